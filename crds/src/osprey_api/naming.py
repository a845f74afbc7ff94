"""Names, labels and ports. Every name is a function of what it names, so that nothing is ever found by counting."""

import hashlib

GROUP = "osprey.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
FIELD_MANAGER = "osprey-operator"

LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGED_BY = "osprey-operator"
LABEL_KIND = f"{GROUP}/kind"
LABEL_NAME = f"{GROUP}/name"
LABEL_STAGE = f"{GROUP}/stage"
LABEL_FINGERPRINT = f"{GROUP}/fingerprint"
LABEL_COMPONENT = "app.kubernetes.io/component"
ANNOTATION_TEMPLATE_HASH = f"{GROUP}/template-hash"
ANNOTATION_RETRY = f"{GROUP}/retry"

METRICS_PORT = 9464
"""Where a stage's pod serves its progress."""
SERVER_PORT = 30000
"""Where SGLang listens, in a stage's pod and in a Deployment."""
RENDEZVOUS_PORT = 29500
"""Where rank 0 of a training Job of several nodes listens."""
RENDEZVOUS_VARIABLE = "OSPREY_RENDEZVOUS"
"""Host of that rank, in the pods of such a Job."""

CLAIM_MOUNT_ROOT = "/osprey/claims"
"""A claim named in a `pvc://` URI is mounted read-only at this folder plus its name, in every container."""
SCRATCH_PATH = "/osprey/scratch"
"""An emptyDir of the pod: downloads, HOME, TMPDIR."""
DRAFTER_PATH = "/osprey/drafter"
"""Where a server finds its drafter: a link to, or a folder with, config.json and model.safetensors."""
PLUGIN_PATH = "/osprey/plugin"
"""A volume that holds only the SGLang plugin; on the server's PYTHONPATH."""

JOB_NAME_LIMIT = 52
"""Pods of an Indexed Job add '-' and an index to its name and use that as a host name (63 characters at most)."""
LABEL_VALUE_LIMIT = 63


def shortened(name: str, limit: int) -> str:
    """Return `name`, or, where it is longer than `limit`, its beginning and eight hex digits of its SHA-256.

    Dots become hyphens, so that the result is a DNS label. Two long names with one beginning stay apart.
    """
    label = name.replace(".", "-")
    if len(label) <= limit and label == name:
        return label
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{label[: limit - 9].rstrip('-')}-{digest}"


def stage_job_name(resource: str, stage: str, fingerprint: str) -> str:
    """Name the Job of a stage: `<resource>-<stage>-<8 hex of the fingerprint>`."""
    suffix = f"-{stage}-{fingerprint[:8]}"
    return shortened(resource, JOB_NAME_LIMIT - len(suffix)) + suffix


def fingerprint_label(fingerprint: str) -> str:
    """Return as much of a fingerprint as fits a label: 32 hex digits, 128 bits."""
    return fingerprint[:32]


MODEL_PATH = "/osprey/model"
"""Where a model that does not come from a claim is downloaded to, for a server of the pod."""
MODEL_CACHE_PATH = "/osprey/model-cache"
"""Where the claim of `modelCache` is mounted; also HF_HOME."""
WANTED_PATH = "/osprey/wanted/wanted.json"
"""Where a Deployment's ConfigMap with `ServerFiles` is mounted."""
