{{/* The end of every chart's notes: what holds for all. */}}
{{- define "common.notes" -}}
{{- $name := include "common.fullname" . -}}
{{- if .Values.run.configMap }}
The run file is the ConfigMap {{ .Values.run.configMap }}, the same for every chart; the buffer refuses a worker whose run file differs:
  kubectl -n {{ .Release.Namespace }} create configmap {{ .Values.run.configMap }} --from-file={{ .Values.run.key }}=run.toml --dry-run=client -o yaml | kubectl apply -f -
After a change restart every service: --set run.revision=2 in each upgrade, or kubectl rollout restart.
{{- end }}
{{- if not .Values.tls.enabled }}
{{- if eq .Chart.Name "environment" }}
Plaintext: tls.enabled is false; whoever reaches the address may call, so let the network policy say who does.
{{- else }}
Plaintext: tls.enabled is false, and the services refuse to listen off loopback without certificates.
{{- end }}
{{- else if .Values.tls.issuer.name }}
Certificates: issued by the {{ .Values.tls.issuer.kind }} {{ .Values.tls.issuer.name }} (kubectl get certificate), reloaded without a restart.
{{- else }}
Certificates: bring the Secret {{ .Values.tls.secretName | default (printf "%s-tls" $name) }} with tls.crt, tls.key and ca.crt; slipstream certs DIR makes them:
  kubectl -n {{ .Release.Namespace }} create secret generic {{ .Values.tls.secretName | default (printf "%s-tls" $name) }} --from-file=DIR/{{ .Chart.Name }}
{{- end }}
{{- if not .Values.metrics.podMonitor.enabled }}
Metrics are served on port {{ .Values.ports.metrics }} and scraped by nobody: metrics.podMonitor.enabled is false.
{{- end }}
Upgrades: always pass the same -f files again. `helm upgrade` without them reuses the values of the release, not those of your files.
{{- end -}}
