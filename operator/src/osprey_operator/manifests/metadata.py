"""Names, labels and owner of a child."""

from enum import StrEnum

from osprey_api.naming import (
    GROUP,
    LABEL_COMPONENT,
    LABEL_FINGERPRINT,
    LABEL_KIND,
    LABEL_MANAGED_BY,
    LABEL_NAME,
    LABEL_STAGE,
    LABEL_VALUE_LIMIT,
    MANAGED_BY,
    fingerprint_label,
    shortened,
)
from osprey_api.stages import StageTask
from osprey_operator.state import KubernetesObject, Owner

LABEL_OWNER_UID = f"{GROUP}/owner-uid"
"""UID of the resource, on its pods: a server's pod belongs to a ReplicaSet, and names are used again."""
LABEL_DRAFTER = f"{GROUP}/drafter"
"""Beginning of the digest of the drafter that a server's pod was made for, so that traffic is told apart by it."""
NO_DRAFTER = "none"
"""Value of that label where the target is served alone."""
SERVICE_NAME_LIMIT = 63


class Component(StrEnum):
    """What a child is for."""

    STAGE = "stage"
    SERVER = "server"


def identity(owner: Owner, component: Component) -> dict[str, str]:
    """Return the labels that tell whose a child is. They never change, so that selectors can use them."""
    return {
        LABEL_MANAGED_BY: MANAGED_BY,
        LABEL_KIND: owner.kind,
        LABEL_NAME: shortened(owner.name, LABEL_VALUE_LIMIT),
        LABEL_COMPONENT: component,
    }


def stage_labels(owner: Owner, task: StageTask) -> dict[str, str]:
    """Return the labels of a stage's Job and of its pods."""
    return {
        **identity(owner, Component.STAGE),
        LABEL_STAGE: task.stage,
        LABEL_FINGERPRINT: fingerprint_label(task.fingerprint),
    }


def metadata(
    owner: Owner, name: str, labels: dict[str, str], annotations: dict[str, str] | None = None
) -> KubernetesObject:
    """Return the `metadata` of a child."""
    result: KubernetesObject = {
        "name": name,
        "namespace": owner.namespace,
        "labels": labels,
        "ownerReferences": [owner.owner_reference()],
    }
    if annotations:
        result["annotations"] = annotations
    return result


def service_name(name: str, limit: int = SERVICE_NAME_LIMIT) -> str:
    """Return `name`, or what a Service can be called instead of it: a Service begins with a letter.

    No resource is called `n..something`, so the hash in the new name is one that no other name has.
    """
    return shortened(name if name[0].isalpha() else f"n..{name}", limit)
