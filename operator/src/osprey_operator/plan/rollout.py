"""The servers of a drafter: what is to be applied, and how far they are."""

from dataclasses import dataclass, field
from datetime import datetime

from osprey_api.conditions import FailureReason
from osprey_api.fingerprint import sha256
from osprey_api.naming import LABEL_STAGE, SERVER_PORT
from osprey_operator.children import annotation, called, is_deleting, label, name_of
from osprey_operator.manifests.metadata import LABEL_DRAFTER, LABEL_OWNER_UID, NO_DRAFTER
from osprey_operator.manifests.server import server_name
from osprey_operator.plan.failures import Trouble, trouble_of
from osprey_operator.state import ANNOTATION_APPLIED, KubernetesObject, Observed, Owner


@dataclass(frozen=True)
class Rollout:
    """How far the servers are, and what there is to do for them."""

    available: bool = False
    """At least one server answers."""
    complete: bool = False
    """Every server is as wanted now."""
    trouble: Trouble | None = None
    endpoint: str = ""
    apply: tuple[KubernetesObject, ...] = ()
    delete: tuple[KubernetesObject, ...] = ()
    secret: str | None = None
    """Name of the Secret with the admin key, where it may be missing."""
    wake_at: tuple[datetime, ...] = field(default=())
    updated: int = 0
    """Servers that are as wanted and ready, at most."""
    wanted: int = 0
    left_alone: bool = False
    """Nothing is done, since what should be served is not known for a while."""


def roll_out(owner: Owner, wanted: list[KubernetesObject], secret: str, observed: Observed, now: datetime) -> Rollout:
    """Compare the objects that should be with those that are.

    An object is applied when it is missing or was made from something else; which of the two a Deployment's pods
    are made from, its own status tells.
    """
    marked = [_marked(child) for child in wanted]
    apply: list[KubernetesObject] = []
    wake_at: list[datetime] = []
    trouble: Trouble | None = None
    refusal = observed.refusals.get(f"Secret {secret}")
    secret_refused = refusal is not None and now < refusal.retry_at
    if refusal is not None and secret_refused:
        trouble = Trouble(refusal.reason, refusal.message)
        wake_at.append(refusal.retry_at)
    for child in marked:
        refusal = observed.refusals.get(called(child))
        content = annotation(child, ANNOTATION_APPLIED)
        if refusal is not None and refusal.content == content and now < refusal.retry_at:
            trouble = Trouble(refusal.reason, refusal.message)
            wake_at.append(refusal.retry_at)
            continue
        found = _find(observed, child)
        if found is None or annotation(found, ANNOTATION_APPLIED) != content:
            apply.append(child)
    deployment = next(child for child in marked if child["kind"] == "Deployment")
    running = _find(observed, deployment)
    pods = tuple(pod for pod in observed.pods if label(pod, LABEL_OWNER_UID) == owner.uid)
    if trouble is None and running is not None:
        trouble = trouble_of(running, pods, observed.warnings)
    status = running.get("status", {}) if running is not None else {}
    complete = not apply and trouble is None and running is not None and _is_complete(running)
    missing = running is None or (trouble is not None and trouble.reason is FailureReason.SECRET_NOT_FOUND)
    names = {(child["kind"], name_of(child)) for child in marked}
    return Rollout(
        available=status.get("availableReplicas", 0) >= 1,
        complete=complete,
        trouble=trouble,
        endpoint=_endpoint(owner),
        apply=tuple(apply),
        delete=tuple(
            child for child in _servers(observed) if complete and (child["kind"], name_of(child)) not in names
        ),
        secret=secret if missing and not secret_refused else None,
        wake_at=tuple(wake_at),
        updated=min(status.get("updatedReplicas", 0), status.get("readyReplicas", 0)),
        wanted=running.get("spec", {}).get("replicas", 1) if running is not None else 0,
    )


def withdraw(observed: Observed) -> Rollout:
    """Delete the servers: the drafter is not to be served any more."""
    return Rollout(delete=tuple(child for child in _servers(observed) if not is_deleting(child)))


def left_alone(owner: Owner, observed: Observed, *, rolled_out: bool) -> Rollout:
    """Tell how the servers are that are not touched for a while, since it is not known what they should serve."""
    deployment = _deployment(observed)
    if deployment is None:
        return Rollout(left_alone=True)
    return Rollout(
        available=deployment.get("status", {}).get("availableReplicas", 0) >= 1,
        complete=rolled_out and _is_complete(deployment),
        endpoint=_endpoint(owner),
        left_alone=True,
    )


def serves_drafter(observed: Observed) -> bool:
    """Tell whether the servers that there are were made for a drafter."""
    deployment = _deployment(observed)
    return deployment is not None and label(deployment["spec"]["template"], LABEL_DRAFTER) not in {"", NO_DRAFTER}


def _deployment(observed: Observed) -> KubernetesObject | None:
    return next((child for child in observed.children if child["kind"] == "Deployment"), None)


def _endpoint(owner: Owner) -> str:
    return f"http://{server_name(owner)}.{owner.namespace}.svc:{SERVER_PORT}"


def _servers(observed: Observed) -> list[KubernetesObject]:
    return [child for child in observed.children if not label(child, LABEL_STAGE)]


def _find(observed: Observed, wanted: KubernetesObject) -> KubernetesObject | None:
    return next(
        (
            child
            for child in observed.children
            if child["kind"] == wanted["kind"] and name_of(child) == name_of(wanted) and not is_deleting(child)
        ),
        None,
    )


def _marked(child: KubernetesObject) -> KubernetesObject:
    annotations = {**child["metadata"].get("annotations", {}), ANNOTATION_APPLIED: sha256(child)}
    return {**child, "metadata": {**child["metadata"], "annotations": annotations}}


def _is_complete(deployment: KubernetesObject) -> bool:
    """Tell whether all servers are of the newest template and answer, by what the Deployment's controller says."""
    status = deployment.get("status", {})
    replicas = deployment["spec"].get("replicas", 1)
    return bool(
        status.get("observedGeneration", 0) >= deployment["metadata"].get("generation", 0)
        and status.get("updatedReplicas", 0) == replicas
        and status.get("replicas", 0) == replicas
        and status.get("availableReplicas", 0) == replicas
    )
