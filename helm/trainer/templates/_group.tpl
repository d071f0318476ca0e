{{/* How a pod of the group starts: torchrun with a static rendezvous as soon as there is more than one process. Nothing is
     restarted inside: when a rank dies, torchrun ends, the pod restarts and the LeaderWorkerSet recreates the group. torchrun kills
     its ranks TORCH_ELASTIC_SHUTDOWN_TIMEOUT after a SIGTERM, so it is told the pod's grace. */}}
{{- define "trainer.command" -}}
{{- $v := .Values -}}
{{- if gt (mul $v.nodes $v.processesPerNode) 1 }}
- "torchrun"
{{- if gt (int $v.nodes) 1 }}
- "--nnodes=$(LWS_GROUP_SIZE)"
- "--node-rank=$(LWS_WORKER_INDEX)"
- "--master-addr=$(LWS_LEADER_ADDRESS)"
- {{ printf "--master-port=%v" $v.rendezvousPort | quote }}
{{- else }}
- "--standalone"
{{- end }}
- {{ printf "--nproc-per-node=%v" $v.processesPerNode | quote }}
- "--max-restarts=0"
- "-m"
- "services.trainer"
{{- else }}
- "python"
- "-m"
- "services.trainer"
{{- end }}
{{- end -}}

{{/* Requests equal limits for what is not divisible. */}}
{{- define "trainer.resources" -}}
{{- $v := .Values -}}
{{- $devices := dict -}}
{{- if $v.gpus }}{{- $_ := set $devices "nvidia.com/gpu" (toString $v.gpus) }}{{- end }}
{{- if $v.efa }}{{- $_ := set $devices "vpc.amazonaws.com/efa" (toString $v.efa) }}{{- end }}
{{- if $v.hugepages }}{{- $_ := set $devices "hugepages-2Mi" $v.hugepages }}{{- end }}
{{- toYaml (dict
      "requests" (mergeOverwrite (deepCopy ($v.resources.requests | default dict)) $devices)
      "limits" (mergeOverwrite (deepCopy ($v.resources.limits | default dict)) $devices)) -}}
{{- end -}}

{{- define "trainer.affinity" -}}
{{- $affinity := deepCopy .Values.affinity -}}
{{- if .Values.sameZone -}}
{{- $term := dict "topologyKey" "topology.kubernetes.io/zone" "labelSelector" (dict "matchLabels" (include "common.selector" . | fromYaml)) -}}
{{- $given := dig "podAffinity" "requiredDuringSchedulingIgnoredDuringExecution" list $affinity -}}
{{- $affinity = mergeOverwrite $affinity (dict "podAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (append $given $term))) -}}
{{- end -}}
{{- toYaml $affinity -}}
{{- end -}}

{{/* One pod. Takes a dict: root, probes (false for ranks that serve nothing). */}}
{{- define "trainer.pod" -}}
{{- $root := .root -}}
{{- $v := $root.Values -}}
{{- $shm := ne (toString $v.shmSize) "0" -}}
{{- include "common.pod" (dict "root" $root "probes" .probes "args" (list "--stay")
      "env" (dict "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" (sub (int $v.drain.graceSeconds) 15 | toString))
      "command" (include "trainer.command" $root | fromYamlArray)
      "resources" (include "trainer.resources" $root | fromYaml)
      "affinity" (include "trainer.affinity" $root | fromYaml)
      "volumes" (ternary (list (dict "name" "shm" "emptyDir" (dict "medium" "Memory" "sizeLimit" (toString $v.shmSize)))) list $shm)
      "mounts" (ternary (list (dict "name" "shm" "mountPath" "/dev/shm")) list $shm)) -}}
{{- end -}}
