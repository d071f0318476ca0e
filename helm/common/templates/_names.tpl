{{/* Name of every object of a release: the release's own when it says what it is ("buffer", "demo-buffer"), else chart-release.
     Always a valid DNS label, also for releases named "n" or "1e3"; short enough for the labels of a LeaderWorkerSet. */}}
{{- define "common.fullname" -}}
{{- $release := .Release.Name | replace "." "-" -}}
{{- if and (contains .Chart.Name $release) (regexMatch "^[a-z]" $release) -}}
{{- $release | trunc 45 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Chart.Name $release | trunc 45 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "common.run" -}}
{{- .Values.run.name | default .Values.run.configMap -}}
{{- end -}}

{{/* What selects the pods of a release. Never changes: a Deployment's selector cannot. */}}
{{- define "common.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "common.labels" -}}
{{ include "common.selector" . }}
app.kubernetes.io/component: {{ .Chart.Name | quote }}
app.kubernetes.io/part-of: "slipstream"
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | quote }}
slipstream/run: {{ include "common.run" . | quote }}
{{- range $name, $value := .Values.labels }}
{{ $name }}: {{ $value | quote }}
{{- end }}
{{- end -}}

{{- define "common.metadata" -}}
name: {{ include "common.fullname" . | quote }}
namespace: {{ .Release.Namespace | quote }}
labels:
  {{- include "common.labels" . | nindent 2 }}
{{- with .Values.annotations }}
annotations:
  {{- range $name, $value := . }}
  {{ $name }}: {{ $value | quote }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Labels of pods: the selector, the role by which network policies know each other, and the user's. */}}
{{- define "common.podLabels" -}}
{{ include "common.selector" . }}
slipstream/role: {{ .Chart.Name | quote }}
slipstream/run: {{ include "common.run" . | quote }}
{{- range $name, $value := .Values.podLabels }}
{{ $name }}: {{ $value | quote }}
{{- end }}
{{- end -}}

{{- define "common.image" -}}
{{- $image := .Values.image -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $image.repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $image.repository ($image.tag | default .Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{- define "common.serviceAccountName" -}}
{{- .Values.serviceAccount.name | default (include "common.fullname" .) -}}
{{- end -}}
