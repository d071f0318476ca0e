{{- define "cluster.labels" -}}
app.kubernetes.io/name: "cluster"
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/part-of: "slipstream"
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | quote }}
{{- range $name, $value := .Values.labels }}
{{ $name }}: {{ $value | quote }}
{{- end }}
{{- end -}}

{{/* First boot of a fabric node. Registered memory must not be limited (a container inherits containerd's limit, and a process
     that is not root cannot raise it); huge pages are set aside while memory is not yet in pieces. */}}
{{- define "cluster.userData" -}}
MIME-Version: 1.0
Content-Type: multipart/mixed; boundary="//"

--//
Content-Type: text/x-shellscript; charset="us-ascii"

#!/bin/bash
set -eu
mkdir -p /etc/systemd/system/containerd.service.d
printf '[Service]\nLimitMEMLOCK=infinity\n' > /etc/systemd/system/containerd.service.d/memlock.conf
{{- if .hugepages }}
echo 'vm.nr_hugepages={{ .hugepages }}' > /etc/sysctl.d/90-hugepages.conf
sysctl -p /etc/sysctl.d/90-hugepages.conf
{{- end }}
systemctl daemon-reload
--//--
{{- end -}}
