{{- define "aerie.chart" -}}
{{ .Values.nameOverride | default .Chart.Name | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "aerie.name" -}}
{{- $chart := include "aerie.chart" . }}
{{- if .Values.fullnameOverride }}{{ .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- else if contains $chart .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name $chart | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "aerie.image" -}}
{{- $repository := required "image.repository: name the registry that the image was pushed to (docs/containers.md)" .Values.image.repository }}
{{- printf "%s:%s" $repository (.Values.image.tag | default .Chart.AppVersion) | quote }}
{{- end }}

{{- define "aerie.selector" -}}
app.kubernetes.io/name: {{ include "aerie.chart" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "aerie.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "aerie.selector" . }}
{{- end }}

{{- define "aerie.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}{{ .Values.serviceAccount.name | default (include "aerie.name" .) }}
{{- else }}{{ .Values.serviceAccount.name | default "default" }}{{ end }}
{{- end }}

{{- define "aerie.mostPods" -}}
{{- if eq .Values.autoscaling.kind "none" }}{{ .Values.replicas }}{{ else }}{{ .Values.autoscaling.maxReplicas }}{{ end }}
{{- end }}

{{- define "aerie.keysSecret" -}}
{{- if .Values.keys.existingSecret }}{{ .Values.keys.existingSecret }}
{{- else if .Values.keys.text }}{{ include "aerie.name" . }}-keys{{ end }}
{{- end }}

{{- /* Helm reads every number as a float: whole ones are whole again. */ -}}
{{- define "aerie.toml" -}}
{{- regexReplaceAll "(?m)= (-?[0-9]+)\\.0$" (toToml .Values.config) "= ${1}" }}
{{- end }}

{{- /* Sequences that run in each pod beyond which pods are added: 70% of what a gateway admits, which
is 9/8 of max_num_seqs. That is 128 in the presets. */ -}}
{{- define "aerie.runningPerPod" -}}
{{- $sequences := (.Values.config.engine | default dict).max_num_seqs | default 128 }}
{{- $admitted := (.Values.config.admission | default dict).max_running | default (mulf $sequences 1.125) }}
{{- .Values.autoscaling.runningPerPod | default (mulf $admitted 0.7 | ceil) }}
{{- end }}

{{- /* The container's resources, with its GPUs. Without GPUs the memory limit is the request by
default: the KV cache then takes a share of the memory that the container may use. */ -}}
{{- define "aerie.resources" -}}
{{- $resources := deepCopy .Values.resources }}
{{- $limits := $resources.limits | default dict }}
{{- $memory := ($resources.requests | default dict).memory }}
{{- if .Values.gpus }}
{{- $_ := set $limits .Values.gpuResource (toString .Values.gpus) }}
{{- else if and $memory (not (hasKey $limits "memory")) }}
{{- $_ := set $limits "memory" $memory }}
{{- end }}
{{- if not $limits.memory }}{{ $_ := unset $limits "memory" }}{{ end }}
{{- $_ := set $resources "limits" $limits }}
{{- toYaml $resources }}
{{- end }}

{{- /* The number that a quantity of Kubernetes is, such as 64Gi or 500m. */ -}}
{{- define "aerie.number" -}}
{{- $units := dict "" 1 "m" 1e-3 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 }}
{{- range $power, $unit := list "" "Ki" "Mi" "Gi" "Ti" "Pi" "Ei" }}
{{- $size := 1.0 }}
{{- range until $power }}{{ $size = mulf $size 1024 }}{{ end }}
{{- $_ := set $units $unit $size }}
{{- end }}
{{- $unit := regexFind "[A-Za-z]*$" (toString .) }}
{{- mulf (trimSuffix $unit (toString .) | float64) (get $units $unit) }}
{{- end }}

{{- /* What would start and then not do what was asked for is refused here. */ -}}
{{- define "aerie.check" -}}
{{- if and .Values.keys.text .Values.keys.existingSecret }}
{{- fail "keys: give either text or existingSecret, not both" }}
{{- end }}
{{- if and .Values.redis.url .Values.redis.existingSecret }}
{{- fail "redis: give either url or existingSecret, not both" }}
{{- end }}
{{- if and .Values.ingress.enabled (not .Values.ingress.hosts) }}
{{- fail "ingress: enabled, but hosts names none" }}
{{- end }}
{{- if gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas) }}
{{- fail "autoscaling: minReplicas is more than maxReplicas" }}
{{- end }}
{{- $resources := include "aerie.resources" . | fromYaml }}
{{- range $name, $request := $resources.requests }}
{{- $limit := get $resources.limits $name }}
{{- if and $limit (gt (include "aerie.number" $request | float64) (include "aerie.number" $limit | float64)) }}
{{- fail (printf "resources.requests.%s: %v is more than the limit of %v, which Kubernetes refuses" $name $request $limit) }}
{{- end }}
{{- end }}
{{- $none := list "0" "0%" }}
{{- if eq .Values.strategy.type "RollingUpdate" }}
{{- $rolling := .Values.strategy.rollingUpdate | default dict }}
{{- if and (has (toString $rolling.maxUnavailable) $none) (has (toString $rolling.maxSurge) $none) }}
{{- fail "strategy: maxUnavailable and maxSurge are both 0, so that no pod can be replaced" }}
{{- end }}
{{- end }}
{{- $learning := .Values.config.learning | default dict }}
{{- if $learning.learn }}
{{- if gt (int (include "aerie.mostPods" .)) 1 }}
{{- fail "config.learning.learn: one gateway learns in a folder; give replicas 1, without an autoscaler" }}
{{- end }}
{{- $rolling := .Values.strategy.rollingUpdate | default dict }}
{{- if and (eq .Values.strategy.type "RollingUpdate") (not (has (toString $rolling.maxSurge) $none)) }}
{{- fail "config.learning.learn: a new pod would wait for the folder of the old one, which ends only when the new one is ready; give strategy.type Recreate" }}
{{- end }}
{{- end }}
{{- if and .Values.autoscaling.speedup (ne .Values.autoscaling.kind "keda") }}
{{- fail "autoscaling.speedup: only kind keda looks at it" }}
{{- end }}
{{- $admission := .Values.config.admission | default dict }}
{{- if and (include "aerie.keysSecret" .) (hasKey $admission "public_paths") }}
{{- $public := splitList "," (nospace (toString $admission.public_paths)) }}
{{- range list "/livez" "/readyz" }}
{{- if not (has . $public) }}
{{- fail (printf "config.admission.public_paths: the kubelet asks %s without a key, and would restart the pod or never send it requests" .) }}
{{- end }}
{{- end }}
{{- if and .Values.serviceMonitor.enabled (not .Values.serviceMonitor.apiKey.existingSecret) (not (has "/metrics" $public)) }}
{{- fail "serviceMonitor: config.admission.public_paths leaves /metrics to those with a key; give one in serviceMonitor.apiKey.existingSecret" }}
{{- end }}
{{- end }}
{{- range $section, $name := dict "server" (list "host" "port" "drain_timeout_s") "engine" (list "tensor_parallel_size") "admission" (list "api_key" "keys" "keys_file" "redis_url") }}
{{- range $name }}
{{- if hasKey (index $.Values.config $section | default dict) . }}
{{- if eq . "api_key" }}
{{- fail "config.admission.api_key: a ConfigMap would hold it in plain text; give keys in keys.text or keys.existingSecret" }}
{{- end }}
{{- fail (printf "config.%s.%s: the chart sets it, from another value" $section .) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
