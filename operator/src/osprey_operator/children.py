"""Small questions about Kubernetes objects: whose they are, whether they are finished, what their containers say."""

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from osprey_api.naming import ANNOTATION_TEMPLATE_HASH
from osprey_api.stages import Outcome
from osprey_operator.state import KubernetesObject

STAGE_CONTAINER = "stage"


def name_of(child: KubernetesObject) -> str:
    """Return an object's name."""
    return str(child["metadata"]["name"])


def called(child: KubernetesObject) -> str:
    """Return an object's kind and name, which no other one of its namespace has."""
    return f"{child['kind']} {name_of(child)}"


def uid_of(child: KubernetesObject) -> str:
    """Return an object's UID."""
    return str(child["metadata"]["uid"])


def label(child: KubernetesObject, key: str) -> str:
    """Return a label's value, or an empty string."""
    return str(child["metadata"].get("labels", {}).get(key, ""))


def annotation(child: KubernetesObject, key: str) -> str:
    """Return an annotation's value, or an empty string."""
    return str(child["metadata"].get("annotations", {}).get(key, ""))


def template_hash(child: KubernetesObject) -> str:
    """Return the hash of what a Job was made from."""
    return annotation(child, ANNOTATION_TEMPLATE_HASH)


def owner_uids(child: KubernetesObject) -> set[str]:
    """Return the UIDs of an object's owners."""
    return {str(reference["uid"]) for reference in child["metadata"].get("ownerReferences", [])}


def is_deleting(child: KubernetesObject) -> bool:
    """Tell whether an object is on its way out."""
    return "deletionTimestamp" in child["metadata"]


def condition(child: KubernetesObject, kind: str) -> Mapping[str, Any] | None:
    """Return the condition of a type if it is true."""
    for entry in child.get("status", {}).get("conditions", []):
        if entry["type"] == kind and entry["status"] == "True":
            found: Mapping[str, Any] = entry
            return found
    return None


def job_complete(job: KubernetesObject) -> bool:
    """Tell whether a Job ended well."""
    return condition(job, "Complete") is not None


def job_failed(job: KubernetesObject) -> bool:
    """Tell whether a Job ended badly."""
    return condition(job, "Failed") is not None


def job_finished(job: KubernetesObject) -> bool:
    """Tell whether a Job ended."""
    return job_complete(job) or job_failed(job)


def job_seconds(job: KubernetesObject) -> float:
    """Return how long a failed Job ran, in seconds; 0 where it does not say."""
    failed = condition(job, "Failed")
    started = job.get("status", {}).get("startTime")
    if failed is None or started is None or "lastTransitionTime" not in failed:
        return 0.0
    return (parse_time(failed["lastTransitionTime"]) - parse_time(started)).total_seconds()


def pods_of(owner: KubernetesObject, pods: Iterable[KubernetesObject]) -> tuple[KubernetesObject, ...]:
    """Return the pods that a Job made."""
    return tuple(pod for pod in pods if uid_of(owner) in owner_uids(pod))


def pod_alive(pod: KubernetesObject) -> bool:
    """Tell whether a pod may still run something."""
    return pod.get("status", {}).get("phase") not in {"Succeeded", "Failed"}


def containers(pod: KubernetesObject) -> Iterator[Mapping[str, Any]]:
    """Yield the statuses of a pod's containers: the stage's first, then the others, then the init containers."""
    status = pod.get("status", {})
    ordinary = status.get("containerStatuses", [])
    yield from sorted(ordinary, key=lambda entry: entry["name"] != STAGE_CONTAINER)
    yield from status.get("initContainerStatuses", [])


def outcome_in(terminated: Mapping[str, Any]) -> Outcome | None:
    """Return what a container's termination message says; None: it is no outcome."""
    try:
        return Outcome.model_validate_json(terminated.get("message") or "")
    except ValidationError:
        return None


def success_of(pods: Iterable[KubernetesObject]) -> Outcome | None:
    """Return what a stage made, as the containers that ended well say; None: none does.

    Of several pods only the first publishes the artifact: the others have a result, and nothing else to show for it.
    """
    said = [outcome for outcome in map(outcome_in, _ended_well(pods)) if outcome is not None]
    results = [outcome for outcome in said if outcome.result is not None]
    return next((outcome for outcome in results if outcome.artifact is not None), results[0] if results else None)


def stage_ended_at(pods: Iterable[KubernetesObject]) -> str | None:
    """Return when the stage's container that ended well did so."""
    return next((str(ended.get("finishedAt", "")) for ended in _ended_well(pods)), None)


def _ended_well(pods: Iterable[KubernetesObject]) -> Iterator[Mapping[str, Any]]:
    """Yield the ends of stages' containers that exited with 0."""
    for pod in pods:
        for container in containers(pod):
            ended = container.get("state", {}).get("terminated")
            if container["name"] == STAGE_CONTAINER and ended and ended["exitCode"] == 0:
                yield ended


def parse_time(text: str) -> datetime:
    """Return the moment that a Kubernetes timestamp says."""
    return datetime.fromisoformat(text)
