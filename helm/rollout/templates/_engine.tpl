{{/* Pods of engines. Takes a dict: root, tier ("elastic" or "floor"), member (true = behind a leader), command (of those, if another). */}}
{{- define "rollout.pod" -}}
{{- $v := .root.Values -}}
{{- $shm := ne (toString $v.shmSize) "0" -}}
{{- $volumes := ternary (list (dict "name" "shm" "emptyDir" (dict "medium" "Memory" "sizeLimit" (toString $v.shmSize)))) list $shm -}}
{{- $mounts := ternary (list (dict "name" "shm" "mountPath" "/dev/shm")) list $shm -}}
{{- $pod := dict "root" .root "volumes" $volumes "mounts" $mounts "labels" (dict "slipstream/tier" .tier) "affinity" (include "rollout.affinity" . | fromYaml) -}}
{{- if .command -}}
{{- $pod = merge (dict "command" .command "arguments" false "probes" false) $pod -}}
{{- else if .member -}}
{{- $leader := printf "$(LWS_LEADER_ADDRESS):%v" $v.ports.grpc -}}
{{- $pod = merge (dict "command" (list "python3" "-m" "services.rollout.member") "args" (list "--leader" $leader "--node" "$(LWS_WORKER_INDEX)")) $pod -}}
{{- end -}}
{{- include "common.pod" $pod -}}
{{- end -}}

{{/* The user's affinity with the capacity type of the tier. */}}
{{- define "rollout.affinity" -}}
{{- $v := .root.Values -}}
{{- $affinity := deepCopy $v.affinity -}}
{{- if eq .tier "floor" -}}
{{- $own := dict "key" "karpenter.sh/capacity-type" "operator" "NotIn" "values" (list "spot") -}}
{{- $required := dict "nodeSelectorTerms" (list (dict "matchExpressions" (list $own))) -}}
{{- $affinity = mergeOverwrite $affinity (dict "nodeAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" $required)) -}}
{{- else if $v.spot.preferred -}}
{{- $spot := dict "weight" 100 "preference" (dict "matchExpressions" (list (dict "key" "karpenter.sh/capacity-type" "operator" "In" "values" (list "spot")))) -}}
{{- $given := dig "nodeAffinity" "preferredDuringSchedulingIgnoredDuringExecution" list $affinity -}}
{{- $affinity = mergeOverwrite $affinity (dict "nodeAffinity" (dict "preferredDuringSchedulingIgnoredDuringExecution" (append $given $spot))) -}}
{{- end -}}
{{- toYaml $affinity -}}
{{- end -}}

{{/* One workload: a Deployment of one-node engines, or a LeaderWorkerSet of larger ones. Takes root, name, tier, replicas ("" = KEDA's). */}}
{{- define "rollout.workload" -}}
{{- $root := .root -}}
{{- $v := $root.Values -}}
---
{{- $kind := ternary "LeaderWorkerSet" "Deployment" (gt (int $v.nodes) 1) }}
apiVersion: {{ ternary "leaderworkerset.x-k8s.io/v1" "apps/v1" (eq $kind "LeaderWorkerSet") | quote }}
kind: {{ $kind | quote }}
metadata:
  name: {{ .name | quote }}
  namespace: {{ $root.Release.Namespace | quote }}
  labels:
    {{- include "common.labels" $root | nindent 4 }}
    slipstream/tier: {{ .tier | quote }}
  {{- with $v.annotations }}
  annotations:
    {{- range $name, $value := . }}
    {{ $name }}: {{ $value | quote }}
    {{- end }}
  {{- end }}
spec:
  {{- if ne (toString .replicas) "" }}
  replicas: {{ .replicas }}
  {{- end }}
  {{- if eq $kind "Deployment" }}
  revisionHistoryLimit: 3
  progressDeadlineSeconds: 3600   # engines load for a while
  strategy:
    type: RollingUpdate
    rollingUpdate:
      {{- toYaml $v.strategy | nindent 6 }}
  selector:
    matchLabels:
      {{- include "common.selector" $root | nindent 6 }}
      slipstream/tier: {{ .tier | quote }}
  template:
    {{- include "rollout.pod" (dict "root" $root "tier" .tier) | nindent 4 }}
  {{- else }}
  rolloutStrategy:
    type: RollingUpdate
    rollingUpdateConfiguration:
      {{- toYaml $v.strategy | nindent 6 }}
  leaderWorkerTemplate:
    size: {{ $v.nodes }}
    restartPolicy: RecreateGroupOnPodRestart
    leaderTemplate:
      {{- include "rollout.pod" (dict "root" $root "tier" .tier) | nindent 6 }}
    workerTemplate:
      {{- include "rollout.pod" (dict "root" $root "tier" .tier "command" $v.workerCommand "member" true) | nindent 6 }}
  {{- end }}
{{- end -}}
