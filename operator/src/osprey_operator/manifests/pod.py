"""What all our pods share: `restricted` pod security, scratch space, volumes, and how variables are written."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from osprey_api.common import ModelCache
from osprey_api.naming import CLAIM_MOUNT_ROOT, MODEL_CACHE_PATH, SCRATCH_PATH, shortened
from osprey_api.sources import ClaimSource, parse
from osprey_operator.manifests.merge import merged
from osprey_operator.state import KubernetesObject, Settings

USER_ID = 1000
"""User and group of every process, also of images whose own user is root."""
GPU_RESOURCE = "nvidia.com/gpu"
HUB_TOKEN_VARIABLE = "HF_TOKEN"  # noqa: S105 - the name of a variable
_VOLUME_NAME_LIMIT = 63


@dataclass(frozen=True)
class Disk:
    """A volume and where a container sees it."""

    volume: KubernetesObject
    path: str
    read_only: bool = False

    @property
    def mount(self) -> KubernetesObject:
        """The entry of `volumeMounts`."""
        mount: KubernetesObject = {"name": self.volume["name"], "mountPath": self.path}
        return {**mount, "readOnly": True} if self.read_only else mount


def empty(name: str, path: str, *, read_only: bool = False, **options: str) -> Disk:
    """Return an emptyDir. The readers of what an earlier container wrote mount it read-only."""
    return Disk({"name": name, "emptyDir": dict(options)}, path, read_only)


COMMON_DISKS = (
    empty("scratch", SCRATCH_PATH),
    empty("tmp", "/tmp"),  # noqa: S108 - programs that ignore TMPDIR find it, the root being read-only
    empty("shm", "/dev/shm", medium="Memory"),  # noqa: S108 - the default of 64 MiB breaks NCCL and data loaders
)


def model_cache(cache: ModelCache | None) -> tuple[Disk, ...]:
    """Return the claim that keeps downloaded models."""
    return () if cache is None else (Disk(_claim_volume(cache.claim, cache), MODEL_CACHE_PATH),)


def claims(uris: Iterable[str], cache: ModelCache | None) -> tuple[Disk, ...]:
    """Return the claims that `pvc://` URIs name, each once, read-only below `naming.CLAIM_MOUNT_ROOT`."""
    sources = [parse(uri) for uri in uris]
    names = sorted({source.claim for source in sources if isinstance(source, ClaimSource)})
    return tuple(Disk(_claim_volume(name, cache), f"{CLAIM_MOUNT_ROOT}/{name}", read_only=True) for name in names)


def _claim_volume(claim: str, cache: ModelCache | None) -> KubernetesObject:
    """One volume a claim, also when it is both a source and the cache: then it has to be writable."""
    source: KubernetesObject = {"claimName": claim}
    if cache is None or cache.claim != claim:
        source["readOnly"] = True
    return {"name": f"claim-{shortened(claim, _VOLUME_NAME_LIMIT - len('claim-'))}", "persistentVolumeClaim": source}


def literal(text: str) -> str:
    """Return `text` so that Kubernetes, which expands `$(NAME)` in values and arguments, leaves it as it is."""
    return text.replace("$", "$$")


def variable(name: str, value: str) -> KubernetesObject:
    """Return an environment variable with exactly this value."""
    return {"name": name, "value": literal(value)}


def secret_variable(name: str, secret: str, key: str) -> KubernetesObject:
    """Return an environment variable from a Secret; the pod waits while there is none."""
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def credentials(secret: str | None) -> list[KubernetesObject]:
    """Return `envFrom` of a container that talks to S3: keys, and whatever else boto3 reads of its environment."""
    return [] if secret is None else [{"secretRef": {"name": secret}}]


def hub_token(secret: str | None) -> list[KubernetesObject]:
    """Return the variable by which gated models and data are downloaded."""
    return [] if secret is None else [secret_variable(HUB_TOKEN_VARIABLE, secret, HUB_TOKEN_VARIABLE)]


def gpus(count: int) -> KubernetesObject:
    """Return the `resources` of a container with so many GPUs."""
    return {"limits": {GPU_RESOURCE: str(count)}} if count else {}


def container(
    name: str,
    image: str,
    settings: Settings,
    *,
    command: Sequence[str],
    env: Sequence[KubernetesObject] = (),
    disks: Sequence[Disk] = (),
    **more: Any,
) -> KubernetesObject:
    """Return a container that `restricted` admits; `more` are further fields, left out where they are empty."""
    cached = any(disk.path == MODEL_CACHE_PATH for disk in disks)
    return {
        "name": name,
        "image": image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": list(command),
        "env": [
            variable("HOME", SCRATCH_PATH),
            variable("TMPDIR", SCRATCH_PATH),
            variable("USER", "osprey"),  # the user id has no entry in an image's passwd, which getpass asks otherwise
            variable("PYTHONUNBUFFERED", "1"),
            *([variable("HF_HOME", MODEL_CACHE_PATH)] if cached else []),
            *env,
        ],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [disk.mount for disk in (*COMMON_DISKS, *disks)],
        **{field: value for field, value in more.items() if value},
    }


def template(
    *,
    labels: Mapping[str, str],
    annotations: Mapping[str, str],
    init_containers: Sequence[KubernetesObject],
    containers: Sequence[KubernetesObject],
    disks: Sequence[Disk],
    grace_period_seconds: int,
    fragments: Sequence[Mapping[str, Any] | None],
    **more: Any,
) -> KubernetesObject:
    """Return a pod template with `fragments` merged into it, the later ones last; our labels stay."""
    volumes = {disk.volume["name"]: disk.volume for disk in (*COMMON_DISKS, *disks)}
    pod: KubernetesObject = {
        "metadata": {"labels": dict(labels), "annotations": dict(annotations)},
        "spec": {
            **({"initContainers": list(init_containers)} if init_containers else {}),
            "containers": list(containers),
            "volumes": list(volumes.values()),
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,  # a Service called `sglang` would set variables that SGLang reads
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER_ID,
                "runAsGroup": USER_ID,
                "fsGroup": USER_ID,
                "fsGroupChangePolicy": "OnRootMismatch",  # or each start would walk a whole model cache
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "terminationGracePeriodSeconds": grace_period_seconds,
            **more,
        },
    }
    for fragment in fragments:
        if fragment:
            pod = merged(pod, fragment)
    return merged(pod, {"metadata": {"labels": dict(labels)}})
