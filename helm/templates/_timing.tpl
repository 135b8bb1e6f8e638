{{/* Probes, and how long a start and an end may take; all in whole seconds. */}}

{{/* Time until ready: reading the weights at the expected rate, with headroom, and all else. */}}
{{- define "day0.startupSeconds" -}}
{{- $service := get .root.Values (printf "%s_svc" .component) -}}
{{- $base := int64 $service.startup.baseSeconds -}}
{{- if eq .component "router" -}}
{{- $base -}}
{{- else -}}
{{- $bytes := int64 .root.Values.model.weightBytes -}}
{{- if lt $bytes 1 }}{{ fail "model.weightBytes: required, the bytes of all weight files (`day0 manifest --json` prints them)" }}{{ end -}}
{{- $rate := int64 $service.startup.bytesPerSecond -}}
{{- add $base (div (add (mul $bytes (int64 $service.startup.headroom)) (sub $rate 1)) $rate) -}}
{{- end -}}
{{- end -}}

{{/* terminationGracePeriodSeconds: above preStop and drain, or the kubelet kills streams that may still run. */}}
{{- define "day0.graceSeconds" -}}
{{- $key := printf "%s_svc" .component -}}
{{- $service := get .root.Values $key -}}
{{- $needed := addf (float64 $service.preStopSeconds) (float64 $service.settings.drain_seconds) -}}
{{- $grace := int64 $service.terminationGracePeriodSeconds -}}
{{- if not $grace -}}
{{- int64 (ceil (addf $needed 10)) -}}
{{- else if le (float64 $grace) $needed -}}
{{- fail (printf "%s.terminationGracePeriodSeconds: %d must be greater than preStopSeconds + settings.drain_seconds = %v" $key $grace $needed) -}}
{{- else -}}
{{- $grace -}}
{{- end -}}
{{- end -}}

{{/* Takes "service" beside root: the name that grpc.health.v1 is asked for. */}}
{{- define "day0.probeAction" -}}
{{- if eq .root.Values.probes.style "grpc" -}}
{{- $version := .root.Capabilities.KubeVersion.Version -}}
{{- if semverCompare "<1.24-0" $version }}{{ fail (printf "probes.style: grpc needs Kubernetes 1.24, the cluster has %s; set exec" $version) }}{{ end -}}
grpc:
  port: 50052
  service: {{ .service | quote }}
timeoutSeconds: 5
{{- else -}}
exec:
  command: ["python", "-m", "svc_common.health_probe", "--port", "50052", "--service", {{ .service | quote }}, "--timeout-seconds", "5"]
# The interpreter has to start as well.
timeoutSeconds: 10
{{- end -}}
{{- end -}}

{{- define "day0.probes" -}}
{{- $ready := include "day0.probeAction" (dict "root" .root "service" (include "day0.grpcService" .)) -}}
{{- $alive := include "day0.probeAction" (dict "root" .root "service" "") -}}
startupProbe:
  {{- $ready | nindent 2 }}
  periodSeconds: 5
  failureThreshold: {{ div (add (int64 (include "day0.startupSeconds" .)) 4) 5 }}
livenessProbe:
  {{- $alive | nindent 2 }}
  periodSeconds: 10
  failureThreshold: {{ div (add (int64 .root.Values.probes.livenessWindowSeconds) 9) 10 }}
readinessProbe:
  {{- $ready | nindent 2 }}
  periodSeconds: 5
  failureThreshold: 2
{{- end -}}
