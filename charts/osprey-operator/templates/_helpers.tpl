{{- define "osprey.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "osprey.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- else if contains (include "osprey.name" .) .Release.Name }}
{{- .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "osprey.name" .) | trunc 63 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- /* Cluster-wide objects: a release of the same name may be in another namespace. */}}
{{- define "osprey.clusterName" -}}
{{- printf "%s:%s" .Release.Namespace (include "osprey.fullname" .) }}
{{- end }}

{{- define "osprey.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- .Values.serviceAccount.name | default (include "osprey.fullname" .) }}
{{- else }}
{{- .Values.serviceAccount.name | default "default" }}
{{- end }}
{{- end }}

{{- define "osprey.selectorLabels" -}}
app.kubernetes.io/name: {{ include "osprey.name" . }}
app.kubernetes.io/instance: {{ .Release.Name | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "osprey.labels" -}}
{{ include "osprey.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- /* A value as text: a number is written with all its digits, which `toString` does not do. */}}
{{- define "osprey.text" -}}
{{- if kindIs "string" . }}{{ . }}{{ else }}{{ toJson . }}{{ end }}
{{- end }}

{{- /* An image: dict "image" (repository, tag, digest) "default" (the tag where none is set). */}}
{{- define "osprey.image" -}}
{{- $tag := include "osprey.text" .image.tag | default .default -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}:{{ $tag }}
{{- end }}
{{- end }}

{{- /* What tells one SGLang from another: another image must not pass for the one that was measured. */}}
{{- define "osprey.sglangVersion" -}}
{{- $version := include "osprey.text" .version -}}
{{- $tag := include "osprey.text" .tag | default "latest" -}}
{{- $version | default .digest | default (trimPrefix "v" $tag) }}
{{- end }}

{{- /* Not empty where a CRD is another release's, or somebody's by hand: dict "name" "root". */}}
{{- define "osprey.foreignCrd" -}}
{{- $found := lookup "apiextensions.k8s.io/v1" "CustomResourceDefinition" "" .name }}
{{- $owner := dig "metadata" "annotations" "meta.helm.sh/release-name" "" $found }}
{{- $namespace := dig "metadata" "annotations" "meta.helm.sh/release-namespace" "" $found }}
{{- if and $found (or (ne $owner .root.Release.Name) (ne $namespace .root.Release.Namespace)) }}foreign{{ end }}
{{- end }}

{{- define "osprey.crdName" -}}
{{- printf "%s.osprey.dev" (base . | trimPrefix "osprey.dev_" | trimSuffix ".yaml") }}
{{- end }}

{{- /* What the operator does in a namespace: the verbs of its client (api.py, execute.py) and of its watches. */}}
{{- define "osprey.rules" -}}
- apiGroups: [osprey.dev]
  resources: [ospreybackbones, ospreydrafters]
  verbs: [list, watch]
- apiGroups: [osprey.dev]
  resources: [ospreybackbones/status, ospreydrafters/status]
  verbs: [patch]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, delete]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services, configmaps]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
- apiGroups: [""]
  resources: [events]
  verbs: [list, create]
{{- end }}
