{{/* One KEDA ScaledObject on Prometheus queries. Takes a dict:
       root      the chart's $
       target    name of what is scaled
       kind      Deployment or LeaderWorkerSet
       triggers  list of dict name, query, threshold (string), activation (string, optional)
     An answer that is missing is an error, not 0: replicas stay as they are until Prometheus is back. */}}
{{- define "common.scaledObject" -}}
{{- $root := .root -}}
{{- $auto := $root.Values.autoscaling -}}
---
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  {{- include "common.metadata" $root | nindent 2 }}
spec:
  scaleTargetRef:
    apiVersion: {{ ternary "leaderworkerset.x-k8s.io/v1" "apps/v1" (eq .kind "LeaderWorkerSet") | quote }}
    kind: {{ .kind | quote }}
    name: {{ .target | quote }}
  minReplicaCount: {{ $auto.minReplicas }}
  maxReplicaCount: {{ $auto.maxReplicas }}
  pollingInterval: {{ $auto.pollingSeconds }}
  cooldownPeriod: {{ $auto.scaleDown.stabilizationSeconds }}
  fallback:
    failureThreshold: 3
    replicas: {{ max 1 $auto.minReplicas }}
    behavior: "currentReplicasIfHigher"
  advanced:
    horizontalPodAutoscalerConfig:
      behavior:
        scaleUp:
          stabilizationWindowSeconds: {{ $auto.scaleUp.stabilizationSeconds }}
          policies:
            - {type: Percent, value: {{ $auto.scaleUp.percent }}, periodSeconds: 60}
            - {type: Pods, value: {{ $auto.scaleUp.pods }}, periodSeconds: 60}
        scaleDown:
          stabilizationWindowSeconds: {{ $auto.scaleDown.stabilizationSeconds }}
          policies:
            - {type: Percent, value: {{ $auto.scaleDown.percent }}, periodSeconds: 60}
  triggers:
    {{- range .triggers }}
    - type: prometheus
      name: {{ .name | quote }}
      metricType: "AverageValue"
      metadata:
        serverAddress: {{ $auto.prometheus | quote }}
        query: {{ .query | quote }}
        threshold: {{ .threshold | quote }}
        activationThreshold: {{ .activation | default "0" | quote }}
        ignoreNullValues: "false"
      {{- with $auto.authenticationRef }}
      authenticationRef:
        {{- toYaml . | nindent 8 }}
      {{- end }}
    {{- end }}
    {{- with $auto.extraTriggers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* Labels that pick this run's series out of a shared Prometheus. */}}
{{- define "common.series" -}}
namespace={{ .Release.Namespace | quote }},run={{ include "common.run" . | quote }}
{{- end -}}
