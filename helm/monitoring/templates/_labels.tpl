{{- define "monitoring.name" -}}
{{- printf "slipstream-%s" (.Release.Name | replace "." "-") | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "monitoring.labels" -}}
app.kubernetes.io/name: "monitoring"
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/part-of: "slipstream"
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | quote }}
{{- range $name, $value := .Values.labels }}
{{ $name }}: {{ $value | quote }}
{{- end }}
{{- end -}}
