{{/* Objects that every release has beside its pods; each define is one or more YAML documents. */}}

{{- define "common.objects" -}}
{{ include "common.serviceAccount" . }}
{{ include "common.pdb" . }}
{{ include "common.certificate" . }}
{{ include "common.podMonitor" . }}
{{ include "common.extraObjects" . }}
{{- end -}}

{{- define "common.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}
---
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ include "common.serviceAccountName" . | quote }}
  namespace: {{ .Release.Namespace | quote }}
  labels:
    {{- include "common.labels" . | nindent 4 }}
  {{- with .Values.serviceAccount.annotations }}
  annotations:
    {{- range $name, $value := . }}
    {{ $name }}: {{ $value | quote }}
    {{- end }}
  {{- end }}
automountServiceAccountToken: false
{{- end }}
{{- end -}}

{{/* Guards evictions (node upgrades, consolidation); neither a scale-down nor a Spot reclaim asks it: leases do. */}}
{{- define "common.pdb" -}}
{{- if .Values.pdb.enabled }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "common.metadata" . | nindent 2 }}
spec:
  maxUnavailable: {{ .Values.pdb.maxUnavailable }}
  unhealthyPodEvictionPolicy: "AlwaysAllow"
  selector:
    matchLabels:
      {{- include "common.selector" . | nindent 6 }}
{{- end }}
{{- end -}}

{{/* A Service. Headless by default: every channel is long-lived, and clients find all addresses. */}}
{{- define "common.service" -}}
---
apiVersion: v1
kind: Service
metadata:
  {{- include "common.metadata" . | nindent 2 }}
spec:
  type: {{ .Values.service.type | quote }}
  {{- if .Values.service.headless }}
  clusterIP: "None"
  {{- end }}
  selector:
    {{- include "common.selector" . | nindent 4 }}
  ports:
    - {name: grpc, port: {{ .Values.ports.grpc }}, targetPort: {{ .Values.ports.grpc }}, protocol: TCP}
    {{- if .Values.ports.client }}
    - {name: client, port: {{ .Values.ports.client }}, targetPort: {{ .Values.ports.client }}, protocol: TCP}
    {{- end }}
{{- end -}}

{{/* A certificate that names the role twice, see slipstream/tls.py; cert-manager renews the Secret, the process reloads it. */}}
{{- define "common.certificate" -}}
{{- $tls := .Values.tls -}}
{{- if and $tls.enabled $tls.issuer.name }}
{{- $name := include "common.fullname" . }}
---
apiVersion: cert-manager.io/v1
kind: Certificate
metadata:
  {{- include "common.metadata" . | nindent 2 }}
spec:
  secretName: {{ $tls.secretName | default (printf "%s-tls" $name) | quote }}
  duration: {{ $tls.duration | quote }}
  renewBefore: {{ $tls.renewBefore | quote }}
  commonName: {{ .Chart.Name | quote }}
  dnsNames:
    - {{ printf "%s.slipstream.internal" .Chart.Name | quote }}
  uris:
    - {{ printf "spiffe://slipstream/%s" .Chart.Name | quote }}
  usages: ["digital signature", "key encipherment", "server auth", "client auth"]
  privateKey: {algorithm: ECDSA, size: 256, encoding: PKCS8, rotationPolicy: Always}
  issuerRef:
    name: {{ $tls.issuer.name | quote }}
    kind: {{ $tls.issuer.kind | quote }}
    group: "cert-manager.io"
{{- end }}
{{- end -}}

{{/* Scrapes pods, not Services: workers have none. The label `run` separates runs that share a Prometheus. */}}
{{- define "common.podMonitor" -}}
{{- $monitor := .Values.metrics.podMonitor -}}
{{- if $monitor.enabled }}
---
apiVersion: monitoring.coreos.com/v1
kind: PodMonitor
metadata:
  name: {{ include "common.fullname" . | quote }}
  namespace: {{ .Release.Namespace | quote }}
  labels:
    {{- include "common.labels" . | nindent 4 }}
    {{- range $name, $value := $monitor.labels }}
    {{ $name }}: {{ $value | quote }}
    {{- end }}
spec:
  jobLabel: "slipstream/role"
  selector:
    matchLabels:
      {{- include "common.selector" . | nindent 6 }}
  podMetricsEndpoints:
    - port: metrics
      interval: {{ $monitor.interval | quote }}
      relabelings:
        - {action: replace, targetLabel: run, replacement: {{ include "common.run" . | quote }}}
        - {action: replace, sourceLabels: [__meta_kubernetes_pod_label_slipstream_tier], targetLabel: tier}
{{- end }}
{{- end -}}

{{- define "common.extraObjects" -}}
{{- range .Values.extraObjects }}
---
{{ if kindIs "string" . }}{{ tpl . $ }}{{ else }}{{ tpl (toYaml .) $ }}{{ end }}
{{- end }}
{{- end -}}
