{{/* Nobody talks to a pod of Slipstream, and it talks to nobody, but for what is listed. Takes a dict:
       root      the chart's $
       callers   roles that may call the gRPC port
       calls     list of dict role, port: pods of the run that it calls
       open      list of ports to which any address may be called: object store, Redis
       peers     true = all ports between the pods of this release: torch and NCCL rendezvous
     EFA traffic passes by every network policy: the security group of its nodes guards it. */}}
{{- define "common.networkPolicy" -}}
{{- $root := .root -}}
{{- $v := $root.Values -}}
{{- if $v.networkPolicy.enabled }}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  {{- include "common.metadata" $root | nindent 2 }}
spec:
  podSelector:
    matchLabels:
      {{- include "common.selector" $root | nindent 6 }}
  policyTypes: ["Ingress", "Egress"]
  ingress:
    {{- if .callers }}
    - from:
        - podSelector:
            matchLabels:
              slipstream/run: {{ include "common.run" $root | quote }}
            matchExpressions:
              - {key: slipstream/role, operator: In, values: {{ toJson .callers }}}
      ports:
        - {port: {{ $v.ports.grpc }}, protocol: TCP}
    {{- end }}
    {{- if $v.ports.metrics }}
    - from:
        - namespaceSelector:
            matchLabels:
              kubernetes.io/metadata.name: {{ $v.networkPolicy.prometheusNamespace | quote }}
      ports:
        - {port: {{ $v.ports.metrics }}, protocol: TCP}
    {{- end }}
    {{- if .peers }}
    - from:
        - podSelector:
            matchLabels:
              {{- include "common.selector" $root | nindent 14 }}
    {{- end }}
    {{- with $v.networkPolicy.ingress }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  egress:
    - to:
        - namespaceSelector:
            matchLabels:
              kubernetes.io/metadata.name: "kube-system"
          podSelector:
            matchLabels:
              k8s-app: "kube-dns"
      ports:
        - {port: 53, protocol: UDP}
        - {port: 53, protocol: TCP}
    - to:
        - ipBlock: {cidr: "169.254.170.23/32"}
      ports:
        - {port: 80, protocol: TCP}
    {{- range .calls }}
    - to:
        - podSelector:
            matchLabels:
              slipstream/role: {{ .role | quote }}
              slipstream/run: {{ include "common.run" $root | quote }}
      ports:
        - {port: {{ .port }}, protocol: TCP}
    {{- end }}
    {{- if .peers }}
    - to:
        - podSelector:
            matchLabels:
              {{- include "common.selector" $root | nindent 14 }}
    {{- end }}
    {{- with .open }}
    - ports:
        {{- range . }}
        - {port: {{ . }}, protocol: TCP}
        {{- end }}
    {{- end }}
    {{- with $v.networkPolicy.egress }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
{{- end -}}
