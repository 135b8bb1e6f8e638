{{/* Settings of a service as its environment variables. */}}

{{/* A value as text. YAML numbers arrive as float64, which would print 1048576 as 1.048576e+06. */}}
{{- define "day0.text" -}}
{{- if kindIs "slice" . -}}
{{- $items := list -}}
{{- range . }}{{ $items = append $items (include "day0.text" .) }}{{ end -}}
{{- join "," $items -}}
{{- else if and (kindIs "float64" .) (eq (floor .) .) -}}
{{- int64 . -}}
{{- else -}}
{{- toString . -}}
{{- end -}}
{{- end -}}

{{/* What the chart itself decides; a field is either here or in `settings` of the values. YAML of field: text. */}}
{{- define "day0.ownSettings" -}}
{{- $values := .root.Values -}}
host: {{ $values.listenAddress | quote }}
grpc_port: "50051"
health_port: "50052"
metrics_port: "9090"
{{- if eq .component "router" }}
{{- if $values.router_svc.llmTargets }}
llm_targets: {{ join "," $values.router_svc.llmTargets | quote }}
{{- else if $values.llm_svc.enabled }}
llm_targets: {{ include "day0.nextTarget" . | quote }}
{{- else }}
{{- fail "router_svc.llmTargets: required where llm_svc.enabled is false" }}
{{- end }}
{{- else }}
model: {{ required "model.uri: required" $values.model.uri | quote }}
model_name: {{ $values.model.name | quote }}
require_manifest: {{ $values.model.requireManifest | quote }}
{{- end }}
{{- if eq .component "llm" }}
{{- if $values.llm_svc.visionTarget }}
vision_target: {{ $values.llm_svc.visionTarget | quote }}
{{- else if $values.vision_svc.enabled }}
vision_target: {{ include "day0.nextTarget" . | quote }}
{{- else }}
vision_target: ""
{{- end }}
{{- end }}
{{- end -}}

{{- define "day0.environment" -}}
{{- $service := get .root.Values (printf "%s_svc" .component) -}}
{{- $prefix := printf "DAY0_%s_" (upper .component) -}}
{{- range $field, $text := include "day0.ownSettings" . | fromYaml }}
- name: {{ $prefix }}{{ upper $field }}
  value: {{ $text | quote }}
{{- end }}
{{- range $field, $value := $service.settings }}
- name: {{ $prefix }}{{ upper $field }}
  value: {{ include "day0.text" $value | quote }}
{{- end }}
{{- with $service.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}
