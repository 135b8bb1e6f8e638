{{/* The pod of every component; takes (dict "root" $ "component" "llm"). */}}

{{- define "day0.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "day0.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "day0.podTemplate" -}}
{{- $service := get .root.Values (printf "%s_svc" .component) -}}
{{- $model := .root.Values.model -}}
{{- $weights := ne .component "router" -}}
metadata:
  labels:
    {{- include "day0.labels" . | nindent 4 }}
    {{- with $service.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $service.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "day0.serviceAccount" . }}
  # Only who follows EndpointSlices calls the API server.
  automountServiceAccountToken: {{ eq (include "day0.followsSlices" .) "yes" }}
  # They would add DAY0_..._PORT variables, which settings refuse as unknown.
  enableServiceLinks: false
  securityContext:
    {{- include "day0.podSecurity" . | nindent 4 }}
  terminationGracePeriodSeconds: {{ include "day0.graceSeconds" . }}
  {{- with .root.Values.images.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . | quote }}
    {{- end }}
  {{- end }}
  containers:
    - name: {{ .component }}
      image: {{ include "day0.image" . | quote }}
      imagePullPolicy: {{ .root.Values.images.pullPolicy }}
      securityContext:
        {{- include "day0.containerSecurity" . | nindent 8 }}
      ports:
        - {name: grpc, containerPort: 50051, protocol: TCP}
        - {name: health, containerPort: 50052, protocol: TCP}
        - {name: metrics, containerPort: 9090, protocol: TCP}
      {{- if and $weights $model.credentialsSecret }}
      envFrom:
        - secretRef:
            name: {{ $model.credentialsSecret | quote }}
      {{- end }}
      env:
        {{- include "day0.environment" . | nindent 8 }}
      {{- include "day0.probes" . | nindent 6 }}
      lifecycle:
        preStop:
          exec:
            command: ["sleep", {{ include "day0.text" $service.preStopSeconds | quote }}]
      # A failed start says file and tensor in its last lines.
      terminationMessagePolicy: FallbackToLogsOnError
      {{- with $service.resources }}
      resources:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        {{- if eq .component "llm" }}
        - {name: shm, mountPath: /dev/shm}
        {{- end }}
        {{- if and $weights $model.persistentVolumeClaim }}
        - {name: models, mountPath: /models, readOnly: true}
        {{- end }}
  volumes:
    - name: tmp
      emptyDir: {}
    {{- if eq .component "llm" }}
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ $service.sharedMemory | quote }}
    {{- end }}
    {{- if and $weights $model.persistentVolumeClaim }}
    - name: models
      persistentVolumeClaim:
        claimName: {{ $model.persistentVolumeClaim | quote }}
        readOnly: true
    {{- end }}
  {{- range $field := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" }}
  {{- with get $service $field }}
  {{ $field }}:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  {{- range $field := list "priorityClassName" "runtimeClassName" }}
  {{- with get $service $field }}
  {{ $field }}: {{ . | quote }}
  {{- end }}
  {{- end }}
{{- end -}}
