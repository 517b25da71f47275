{{/* Name of a resource: the release and the parts of (list root part…), 52 characters at most: Jobs and pods add 11. */}}
{{- define "tidemill.name" -}}
{{- $root := first . -}}
{{- $name := join "-" (prepend (rest .) $root.Release.Name) -}}
{{- if gt (len $name) 52 -}}
{{- $name = printf "%s-%s" (trunc 43 $name | trimAll "-") (sha256sum $name | trunc 8) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{/* Name of the ServiceAccount of (list root part), where part is launcher, workers or serve. */}}
{{- define "tidemill.serviceAccountName" -}}
{{- $root := first . -}}
{{- $account := (get $root.Values (last .)).serviceAccount -}}
{{- if $account.name -}}
{{- $account.name -}}
{{- else if $account.create -}}
{{- include "tidemill.name" . -}}
{{- else -}}
default
{{- end -}}
{{- end -}}

{{/* Labels that select the pods of (list root component [model]). */}}
{{- define "tidemill.selector" -}}
{{- $root := first . -}}
app.kubernetes.io/name: {{ $root.Chart.Name }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- if gt (len .) 2 }}
tidemill/model: {{ index . 2 }}
{{- end }}
{{- end -}}

{{/* Labels of a resource of (list root component [model]). */}}
{{- define "tidemill.labels" -}}
{{- $root := first . -}}
{{ include "tidemill.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* Values of the models by their keys, with the defaults, as YAML. */}}
{{- define "tidemill.models" -}}
{{- $models := dict -}}
{{- range $key, $model := .Values.models -}}
{{- if $model -}}
{{- $_ := set $models $key (mergeOverwrite (deepCopy $.Values.modelDefaults) $model) -}}
{{- end -}}
{{- end -}}
{{- toYaml $models -}}
{{- end -}}

{{/* Rejects values that contradict each other, by their names. */}}
{{- define "tidemill.check" -}}
{{- if not (regexMatch "^[a-z][a-z0-9-]*$" .Release.Name) -}}
{{- fail (printf "the release is named %s: Services require a name of letters, digits and dashes that begins with a letter" .Release.Name) -}}
{{- end -}}
{{- if and .Values.models (not .Values.image.repository) -}}
{{- fail "image.repository is empty: set the image built from container/Dockerfile" -}}
{{- end -}}
{{- if not (hasKey .Values.deployment "environment") -}}
{{- fail "deployment.environment is empty: set it to the Data stack's output WorkerEnvironment, which exists only with compute = \"none\"" -}}
{{- end -}}
{{- range $name := list "TIDEMILL_WORK_QUEUES" "TIDEMILL_MODEL_ALIASES" -}}
{{- with get $.Values.deployment.environment $name -}}
{{- if hasKey (fromJson .) "Error" -}}
{{- fail (printf "deployment.environment.%s is not a JSON object: %s" $name .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $queues := fromJson (.Values.deployment.environment.TIDEMILL_WORK_QUEUES | default "{}") -}}
{{- $keys := dict -}}
{{- range $key, $model := include "tidemill.models" . | fromYaml -}}
{{- if hasKey $keys $model.name -}}
{{- fail (printf "models.%s and models.%s have the same name, %s" (get $keys $model.name) $key $model.name) -}}
{{- end -}}
{{- $_ := set $keys $model.name $key -}}
{{- if not (or $model.workers.enabled $model.serve.enabled) -}}
{{- fail (printf "models.%s has neither workers.enabled nor serve.enabled: enable one of them" $key) -}}
{{- end -}}
{{- if $model.workers.enabled -}}
{{- range list "TIDEMILL_TABLE" "TIDEMILL_BUCKET" "TIDEMILL_CONTROL_QUEUE" "TIDEMILL_WORK_QUEUES" -}}
{{- if not (get $.Values.deployment.environment .) -}}
{{- fail (printf "deployment.environment has no %s, which workers of models.%s require: set it to the Data stack's output WorkerEnvironment, which exists only with compute = \"none\"" . $key) -}}
{{- end -}}
{{- end -}}
{{- if not (include "tidemill.region" $) -}}
{{- fail (printf "deployment.region is empty, and deployment.environment has no AWS_REGION: workers of models.%s require a region" $key) -}}
{{- end -}}
{{- if not (hasKey $queues $model.name) -}}
{{- fail (printf "models.%s.name is %s, which has no queue in TIDEMILL_WORK_QUEUES (%s): add it to `models` of the deployment's configuration and deploy, or set workers.enabled: false for a model without workers" $key $model.name (keys $queues | sortAlpha | join ", ")) -}}
{{- end -}}
{{- end -}}
{{- if gt (int $model.workers.min) (int $model.workers.max) -}}
{{- fail (printf "models.%s.workers.min is above workers.max, %d" $key (int $model.workers.max)) -}}
{{- end -}}
{{- if and $model.workers.minHours (eq $.Values.scaling "keda") -}}
{{- fail (printf "models.%s.workers.minHours requires scaling: launcher; KEDA keeps workers.min at all hours" $key) -}}
{{- end -}}
{{- if $model.tensorParallelSize -}}
{{- if mod (int $model.gpus) (int $model.tensorParallelSize) -}}
{{- fail (printf "models.%s.tensorParallelSize does not divide gpus, %d" $key (int $model.gpus)) -}}
{{- end -}}
{{- end -}}
{{- if and $model.serve.data.volume (or $model.serve.autoscaling.enabled (gt (int $model.serve.replicas) 1)) -}}
{{- fail (printf "models.%s.serve.data.volume belongs to one server: it requires 1 replica and no autoscaling" $key) -}}
{{- end -}}
{{- $targets := list -}}
{{- range $model.serve.autoscaling.targets -}}
{{- if . -}}
{{- $targets = append $targets . -}}
{{- end -}}
{{- end -}}
{{- if not $targets -}}
{{- fail (printf "models.%s.serve.autoscaling.targets are all 0: set at least one" $key) -}}
{{- end -}}
{{- if gt (int $model.serve.autoscaling.minReplicas) (int $model.serve.autoscaling.maxReplicas) -}}
{{- fail (printf "models.%s.serve.autoscaling.minReplicas is above maxReplicas, %d" $key (int $model.serve.autoscaling.maxReplicas)) -}}
{{- end -}}
{{- if and $model.serve.apiKeys.existingSecret $model.serve.metrics.podMonitor (not $model.serve.metrics.existingSecret) -}}
{{- fail (printf "models.%s.serve.metrics.existingSecret is empty: with apiKeys, metrics require a key" $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The image by its digest, else by its tag. */}}
{{- define "tidemill.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{/* Names of the model of (list root model): its own, and the aliases of the deployment, as a list. */}}
{{- define "tidemill.servedNames" -}}
{{- $name := (last .).name -}}
- {{ $name | quote }}
{{- range $alias, $model := fromJson ((first .).Values.deployment.environment.TIDEMILL_MODEL_ALIASES | default "{}") -}}
{{- if eq $model $name }}
- {{ $alias | quote }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Engine flags from a model's values, valid for every command, as a list. */}}
{{- define "tidemill.engineFlags" -}}
{{- $flags := list -}}
{{- if .weights -}}
{{- $flags = concat $flags (list "--model" .weights) -}}
{{- end -}}
{{- $shared := int .tensorParallelSize | default (int .gpus) -}}
{{- if gt $shared 1 -}}
{{- $flags = concat $flags (list "--tensor-parallel-size" (toString $shared)) -}}
{{- end -}}
{{- if lt $shared (int .gpus) -}}
{{- $flags = concat $flags (list "--data-parallel-size" "auto") -}}
{{- end -}}
{{- toYaml (concat $flags .args) -}}
{{- end -}}

{{/* Engines of a worker: groups of GPUs that share the model. */}}
{{- define "tidemill.numEngines" -}}
{{- max 1 (div (int .gpus) (int .tensorParallelSize | default (int .gpus) | max 1)) -}}
{{- end -}}

{{/* Device of a model's engines. */}}
{{- define "tidemill.device" -}}
{{- ternary "cuda" "cpu" (gt (int .gpus) 0) -}}
{{- end -}}

{{/* Resource requests of a model's container, which are also its limits. */}}
{{- define "tidemill.resources" -}}
requests: &resources
  cpu: {{ .cpu | quote }}
  memory: {{ .memory | quote }}
  {{- if gt (int .gpus) 0 }}
  nvidia.com/gpu: {{ int .gpus | quote }}
  {{- end }}
limits: *resources
{{- end -}}

{{/* The image's own user, which owns the volumes. */}}
{{- define "tidemill.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* A container that can write only to its volumes. */}}
{{- define "tidemill.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Fields of a pod that runs a model. */}}
{{- define "tidemill.modelPod" -}}
automountServiceAccountToken: false
# A Service called tidemill-server would set TIDEMILL_SERVER_PORT.
enableServiceLinks: false
# As PID 1 it would miss signals during its start.
shareProcessNamespace: true
securityContext:
  {{- include "tidemill.podSecurity" . | nindent 2 }}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* A volume source: an emptyDir by default. */}}
{{- define "tidemill.volume" -}}
{{- if .volume -}}
{{- toYaml .volume -}}
{{- else -}}
emptyDir:
  sizeLimit: {{ .sizeLimit }}
{{- end -}}
{{- end -}}

{{/* Volumes of a pod of (list model cache); several GPUs communicate through host memory. */}}
{{- define "tidemill.modelVolumes" -}}
- name: cache
  {{- include "tidemill.volume" (last .) | nindent 2 }}
- name: tmp
  emptyDir:
    sizeLimit: 1Gi
{{- if gt (int (first .).gpus) 1 }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: 1Gi
{{- end }}
{{- end -}}

{{/* Mounts of a container that runs a model. */}}
{{- define "tidemill.modelMounts" -}}
- name: cache
  mountPath: /var/cache/tidemill
- name: tmp
  mountPath: /tmp
{{- if gt (int .gpus) 1 }}
- name: shm
  mountPath: /dev/shm
{{- end }}
{{- end -}}

{{/* Region of the deployment, or of a server's weights. */}}
{{- define "tidemill.region" -}}
{{- .Values.deployment.region | default .Values.deployment.environment.AWS_REGION | default "" -}}
{{- end -}}

{{/* Variables that name the deployment's resources and region, as YAML. */}}
{{- define "tidemill.deploymentEnvironment" -}}
{{- $region := include "tidemill.region" . -}}
{{- toYaml (merge (dict "AWS_REGION" $region "AWS_DEFAULT_REGION" $region) .Values.deployment.environment) -}}
{{- end -}}

{{/* A container's list of environment variables, from a dict. */}}
{{- define "tidemill.env" -}}
{{- $list := list -}}
{{- range $name, $value := . -}}
{{- $list = append $list (dict "name" $name "value" $value) -}}
{{- end -}}
{{- toYaml $list -}}
{{- end -}}
