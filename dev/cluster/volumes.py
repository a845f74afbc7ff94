"""This machine's programs as read-only volumes for the pods of a namespace.

Pods run real processes without an image of them: /usr, the interpreter, the virtual environment and the checkout
appear in the pods at the paths that they have here, through volumes that an administrator made beforehand. So the
namespace can enforce the ``restricted`` pod security standard, and what the pods need is the same pod template
override that users of a real cluster have.
"""

import os
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dev.cluster.api import Api
from dev.cluster.image import USER
from dev.settings import REPOSITORY

SCRATCH = "/osprey/scratch"
"""As in the operator's pods (`osprey_api.naming`), which this can't import: it runs without the environment."""
CONTAINERS = ("stage", "server", "sync", "fetch", "plugin")
"""Every container that the operator makes. It takes an entry to whichever list has the container."""


def machine_paths() -> dict[str, Path]:
    """Name the folders that a Python process of this checkout needs: volume name -> path here and in the pod."""
    environment = REPOSITORY / ".venv"
    interpreter = Path(sys.base_prefix).resolve()
    paths = {"usr": Path("/usr"), "checkout": REPOSITORY}
    if not interpreter.is_relative_to("/usr"):
        paths["python"] = interpreter
    if environment.is_symlink():  # otherwise it comes with the checkout
        paths["environment"] = environment.resolve()
    return paths


def volumes(namespace: str, extra: Mapping[str, Path] | None = None) -> list[dict[str, Any]]:
    """Return the PersistentVolumes and their claims, to be applied in this order.

    They are ``hostPath`` volumes: the kubelet changes the owner of what is in a ``local`` one when a pod with
    ``fsGroup`` mounts it, and must not do that to /usr.

    Args:
        namespace: of the claims, which are called as the volumes in the pods.
        extra: more folders, as in ``machine_paths``.
    """
    objects: list[dict[str, Any]] = []
    for name, path in {**machine_paths(), **(extra or {})}.items():
        if not path.is_dir():
            raise NotADirectoryError(f"volume {name}: {path} is not a folder on this machine")
        access = {"accessModes": ["ReadOnlyMany"], "storageClassName": ""}
        volume = {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": f"{namespace}-{name}"},
            "spec": {
                **access,
                "capacity": {"storage": "1Gi"},
                "hostPath": {"path": str(path), "type": "Directory"},
                "claimRef": {"namespace": namespace, "name": name},
                "persistentVolumeReclaimPolicy": "Retain",
            },
        }
        claim = {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {
                **access,
                "volumeName": f"{namespace}-{name}",
                "resources": {"requests": {"storage": "1Gi"}},
            },
        }
        objects += [volume, claim]
    return objects


def pod_template(
    extra: Mapping[str, Path] | None = None,
    env: Mapping[str, str] | None = None,
    containers: Iterable[str] = CONTAINERS,
    init_containers: Iterable[str] = (),
) -> dict[str, Any]:
    """Return the pod template override that mounts ``volumes`` at the paths that they have here.

    It is a strategic merge patch of a PodTemplateSpec. Scratch space is an emptyDir that is also HOME and TMPDIR;
    /dev/shm is memory. PATH finds the virtual environment's programs first.

    Args:
        extra: as given to ``volumes``.
        env: more variables for every container.
        containers: names of the containers that need it; one that is no ``CONTAINERS`` must be in the pod.
        init_containers: the same for init containers, where the operator does not build the pod.
    """
    paths = {**machine_paths(), **(extra or {})}
    variables = {
        "HOME": SCRATCH,
        "TMPDIR": SCRATCH,
        "PATH": f"{REPOSITORY / '.venv' / 'bin'}{os.pathsep}/usr/local/bin:/usr/bin:/bin",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        **(env or {}),
    }
    mounts = [{"name": name, "mountPath": str(path), "readOnly": True} for name, path in paths.items()]
    own = [("scratch", SCRATCH, {}), ("shm", "/dev/shm", {"medium": "Memory"})]
    part = {
        "env": [{"name": name, "value": value} for name, value in variables.items()],
        "volumeMounts": mounts + [{"name": name, "mountPath": path} for name, path, _ in own],
    }
    claims = [{"name": name, "persistentVolumeClaim": {"claimName": name, "readOnly": True}} for name in paths]
    spec = {
        "securityContext": {"runAsUser": USER, "runAsGroup": USER},
        "containers": [{"name": name, **part} for name in containers],
        "initContainers": [{"name": name, **part} for name in init_containers],
        "volumes": claims + [{"name": name, "emptyDir": kind} for name, _, kind in own],
    }
    return {"spec": {key: value for key, value in spec.items() if value}}


def provide(api: Api, namespace: str, extra: Mapping[str, Path] | None = None, timeout_s: float = 30) -> None:
    """Make the volumes and claims of a namespace and return when they are bound.

    A pod that comes before its claims are bound waits for the scheduler's next attempt, which takes seconds.

    Raises:
        TimeoutError: a claim stays unbound; its volume may belong to a former namespace of the same name.
    """
    claims = []
    for manifest in volumes(namespace, extra):
        name = manifest["metadata"]["name"]
        if manifest["kind"] == "PersistentVolume":
            api.apply(f"/api/v1/persistentvolumes/{name}", manifest)
        else:
            claims.append(f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/{name}")
            api.apply(claims[-1], manifest)
    end = time.monotonic() + timeout_s
    while unbound := [claim for claim in claims if api.get(claim)["status"].get("phase") != "Bound"]:
        if time.monotonic() > end:
            raise TimeoutError(f"not bound after {timeout_s:g} s: {', '.join(unbound)}")
        time.sleep(0.05)


def withdraw(api: Api, namespace: str) -> None:
    """Remove the volumes of a namespace that goes: they have no namespace, and would stay bound to its claims."""
    for volume in api.get("/api/v1/persistentvolumes")["items"]:
        if volume["spec"].get("claimRef", {}).get("namespace") == namespace:
            api.delete(f"/api/v1/persistentvolumes/{volume['metadata']['name']}")
