{{/* Names and labels. Everything below takes (dict "root" $ "component" "llm"); the root alone where it says so. */}}

{{/* Root. Short enough for the longest suffix within the 63 characters of a label. */}}
{{- define "day0.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "day0.name" -}}
{{ include "day0.fullname" .root }}-{{ .component }}
{{- end -}}

{{- define "day0.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "day0.labels" -}}
{{ include "day0.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: day0
app.kubernetes.io/managed-by: {{ .root.Release.Service | quote }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | quote }}
{{- end -}}

{{- define "day0.serviceAccount" -}}
{{- $account := (get .root.Values (printf "%s_svc" .component)).serviceAccount -}}
{{- if $account.create -}}
{{ default (include "day0.name" .) $account.name }}
{{- else -}}
{{ default "default" $account.name }}
{{- end -}}
{{- end -}}

{{/* Whose pods a component follows, as a word: the next component of this release, or nothing. */}}
{{- define "day0.next" -}}
{{- $values := .root.Values -}}
{{- if and (eq .component "router") $values.llm_svc.enabled (not $values.router_svc.llmTargets) -}}llm{{- end -}}
{{- if and (eq .component "llm") $values.vision_svc.enabled (not $values.llm_svc.visionTarget) -}}vision{{- end -}}
{{- end -}}

{{/* Not empty where a component asks the cluster's API which pods the next one has. */}}
{{- define "day0.followsSlices" -}}
{{- if and (eq .root.Values.discovery "kubernetes") (include "day0.next" .) -}}yes{{- end -}}
{{- end -}}

{{- define "day0.nextTarget" -}}
{{- $name := include "day0.name" (dict "root" .root "component" (include "day0.next" .)) -}}
{{- if eq .root.Values.discovery "kubernetes" -}}
{{ printf "kubernetes:///%s.%s:50051" $name .root.Release.Namespace }}
{{- else -}}
{{ printf "dns:///%s.%s.svc:50051" $name .root.Release.Namespace }}
{{- end -}}
{{- end -}}

{{- define "day0.image" -}}
{{- $images := .root.Values.images -}}
{{- $image := (get .root.Values (printf "%s_svc" .component)).image -}}
{{- with $images.registry }}{{ trimSuffix "/" . }}/{{ end -}}
{{ $image.repository }}
{{- if $image.digest }}@{{ $image.digest }}{{ else }}:{{ default .root.Chart.AppVersion $images.tag }}{{ end -}}
{{- end -}}

{{/* Root. The enabled components, as words. */}}
{{- define "day0.components" -}}
{{- range list "router" "vision" "llm" -}}
{{- if (get $.Values (printf "%s_svc" .)).enabled }}{{ . }} {{ end -}}
{{- end -}}
{{- end -}}

{{- define "day0.grpcService" -}}
{{- get (dict "router" "day0.router.v1.RouterService" "vision" "day0.vision.v1.VisionService" "llm" "day0.llm.v1.LanguageService") .component -}}
{{- end -}}
