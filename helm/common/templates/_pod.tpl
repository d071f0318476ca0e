{{/* One pod of a service. Takes a dict:
       root          the chart's $
       command       list; absent = the image's own entry point
       args          list, after those that every service has
       resources     replaces .Values.resources
       volumes       list of volumes, beside those that every service has
       mounts        the same for volumeMounts
       env           map, before the user's
       affinity      replaces .Values.affinity
       nodeSelector  replaces .Values.nodeSelector
       labels        map, further labels of the pod
       probes        false = none: the ranks of a trainer that serve nothing
       arguments     false = `args` is all: programs that are no service of Slipstream's
*/}}
{{- define "common.pod" -}}
{{- $root := .root -}}
{{- $v := $root.Values -}}
metadata:
  labels:
    {{- include "common.podLabels" $root | nindent 4 }}
    {{- range $name, $value := .labels }}
    {{ $name }}: {{ $value | quote }}
    {{- end }}
  annotations:
    kubectl.kubernetes.io/default-container: {{ $root.Chart.Name | quote }}
    {{- with $v.run.revision }}
    slipstream/run-revision: {{ . | quote }}
    {{- end }}
    {{- range $name, $value := $v.podAnnotations }}
    {{ $name }}: {{ $value | quote }}
    {{- end }}
spec:
  serviceAccountName: {{ include "common.serviceAccountName" $root | quote }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ $v.drain.graceSeconds }}
  securityContext:
    {{- toYaml (mergeOverwrite (dict "runAsNonRoot" true "runAsUser" 65532 "runAsGroup" 65532 "fsGroup" 65532 "fsGroupChangePolicy" "OnRootMismatch" "seccompProfile" (dict "type" "RuntimeDefault")) $v.podSecurityContext) | nindent 4 }}
  {{- with $v.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $v.priorityClassName }}
  priorityClassName: {{ . | quote }}
  {{- end }}
  {{- with $v.runtimeClassName }}
  runtimeClassName: {{ . | quote }}
  {{- end }}
  {{- with .nodeSelector | default $v.nodeSelector }}
  nodeSelector:
    {{- range $name, $value := . }}
    {{ $name }}: {{ $value | quote }}
    {{- end }}
  {{- end }}
  {{- with $v.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .affinity | default $v.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $v.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $v.initContainers }}
  initContainers:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ $root.Chart.Name | quote }}
      image: {{ include "common.image" $root | quote }}
      imagePullPolicy: {{ $v.image.pullPolicy | quote }}
      {{- with .command }}
      command:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- if or .args (ne .arguments false) }}
      args:
        {{- if ne .arguments false }}
        {{- include "common.args" $root | nindent 8 }}
        {{- end }}
        {{- range .args }}
        - {{ . | quote }}
        {{- end }}
      {{- end }}
      workingDir: "/var/lib/slipstream"
      env:
        {{- include "common.env" . | nindent 8 }}
      {{- with $v.envFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      ports:
        - {name: grpc, containerPort: {{ $v.ports.grpc }}, protocol: TCP}
        {{- if $v.ports.client }}
        - {name: client, containerPort: {{ $v.ports.client }}, protocol: TCP}
        {{- end }}
        {{- if $v.tls.enabled }}
        - {name: health, containerPort: {{ $v.ports.health }}, protocol: TCP}
        {{- end }}
        {{- if $v.ports.metrics }}
        - {name: metrics, containerPort: {{ $v.ports.metrics }}, protocol: TCP}
        {{- end }}
      {{- if ne .probes false }}
      {{- include "common.probes" $root | nindent 6 }}
      {{- end }}
      {{- if $v.drain.preStopSeconds }}
      lifecycle:
        preStop:
          sleep: {seconds: {{ $v.drain.preStopSeconds }}}
      {{- end }}
      securityContext:
        {{- toYaml (mergeOverwrite (dict "allowPrivilegeEscalation" false "readOnlyRootFilesystem" true "capabilities" (dict "drop" (list "ALL"))) $v.securityContext) | nindent 8 }}
      resources:
        {{- toYaml (.resources | default $v.resources) | nindent 8 }}
      volumeMounts:
        {{- include "common.mounts" . | nindent 8 }}
    {{- with $v.extraContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    {{- include "common.volumes" . | nindent 4 }}
{{- end -}}

{{/* Where a pod beside the service's own runs, and how its image is fetched: as the service's. */}}
{{- define "common.placement" -}}
{{- $v := .Values -}}
{{- with $v.nodeSelector }}
nodeSelector:
  {{- range $name, $value := . }}
  {{ $name }}: {{ $value | quote }}
  {{- end }}
{{- end }}
{{- with $v.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $v.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $v.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with $v.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* What every service process is given; slipstream/service.py reads it. */}}
{{- define "common.args" -}}
{{- $v := .Values -}}
- "--run-file"
- {{ printf "/etc/slipstream/run/%s" $v.run.key | quote }}
- "--instance"
- "$(POD_NAME)"
- "--host"
- {{ $v.ports.host | quote }}
- "--port"
- {{ $v.ports.grpc | quote }}
{{- if $v.ports.metrics }}
- "--metrics-port"
- {{ $v.ports.metrics | quote }}
{{- end }}
{{- if $v.buffer }}
- "--buffer"
- {{ $v.buffer.address | quote }}
{{- end }}
{{- if $v.tls.enabled }}
- "--tls-dir"
- "/etc/slipstream/tls"
- "--health-port"
- {{ $v.ports.health | quote }}
{{- end }}
{{- if $v.ports.client }}
- "--client-port"
- {{ $v.ports.client | quote }}
{{- end }}
{{- if $v.auth.secretName }}
- "--secret-file"
- {{ printf "/etc/slipstream/auth/%s" $v.auth.secretKey | quote }}
{{- end }}
{{- end -}}

{{- define "common.env" -}}
{{- $v := .root.Values -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
{{- range $name, $value := mergeOverwrite (dict "HOME" "/var/lib/slipstream" "TOKENIZERS_PARALLELISM" "false") (.env | default dict) $v.env }}
- name: {{ $name | quote }}
  value: {{ $value | quote }}
{{- end }}
{{- with $v.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* gRPC health: the startup probe waits for a model to load, readiness takes a draining pod out, liveness only for a process that
     no longer answers at all. A stall is told by metrics, not by a restart. */}}
{{- define "common.probes" -}}
{{- $v := .Values -}}
{{- $grpc := dict "port" (ternary $v.ports.health $v.ports.grpc $v.tls.enabled) -}}
{{- $defaults := dict
      "startup" (dict "periodSeconds" 5 "failureThreshold" 60 "timeoutSeconds" 5)
      "readiness" (dict "periodSeconds" 5 "failureThreshold" 3 "timeoutSeconds" 5)
      "liveness" (dict "periodSeconds" 20 "failureThreshold" 6 "timeoutSeconds" 10) -}}
{{- range $kind := list "startup" "readiness" "liveness" }}
{{- $given := index $v.probes $kind | default dict }}
{{- if ne (get $given "enabled" | toString) "false" }}
{{- $settings := mergeOverwrite (deepCopy (index $defaults $kind)) (omit $given "enabled") }}
{{ $kind }}Probe:
  grpc: {{ toJson $grpc }}
  {{- toYaml $settings | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "common.mounts" -}}
{{- $v := .root.Values -}}
{{- if $v.run.configMap }}
- {name: run, mountPath: /etc/slipstream/run, readOnly: true}
{{- end }}
- {name: work, mountPath: /var/lib/slipstream}
- {name: tmp, mountPath: /tmp}
{{- if $v.tls.enabled }}
- {name: tls, mountPath: /etc/slipstream/tls, readOnly: true}
{{- end }}
{{- if $v.auth.secretName }}
- {name: auth, mountPath: /etc/slipstream/auth, readOnly: true}
{{- end }}
{{- with .mounts }}
{{ toYaml . }}
{{- end }}
{{- with $v.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* work: the run folder (logs, metrics.jsonl, the finished model); everything durable is in the object store. */}}
{{- define "common.volumes" -}}
{{- $v := .root.Values -}}
{{- if $v.run.configMap }}
- name: run
  configMap: {name: {{ $v.run.configMap | quote }}}
{{- end }}
- name: work
  {{- if $v.workVolume }}
  {{- toYaml $v.workVolume | nindent 2 }}
  {{- else }}
  emptyDir: {}
  {{- end }}
- name: tmp
  emptyDir: {}
{{- if $v.tls.enabled }}
- name: tls
  secret: {secretName: {{ $v.tls.secretName | default (printf "%s-tls" (include "common.fullname" .root)) | quote }}, defaultMode: 288}
{{- end }}
{{- if $v.auth.secretName }}
- name: auth
  secret: {secretName: {{ $v.auth.secretName | quote }}, defaultMode: 288}
{{- end }}
{{- with .volumes }}
{{ toYaml . }}
{{- end }}
{{- with $v.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}
