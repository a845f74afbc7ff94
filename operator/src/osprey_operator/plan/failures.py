"""Why a stage's Job failed, or why it does not get going, as read from the Job, its pods and their events."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from osprey_api.conditions import EXIT_CODE_OF, ConditionReason, ExitCode, FailureReason
from osprey_operator.children import (
    STAGE_CONTAINER,
    condition,
    containers,
    is_deleting,
    name_of,
    outcome_in,
    pod_alive,
    uid_of,
)
from osprey_operator.state import KubernetesObject

PULL_REASONS = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable"}
)
CONFIG_REASONS = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
NO_ROOM = re.compile(r"\bInsufficient \S|\bToo many pods\b|\bexceeded quota\b")
"""How the scheduler and the quota say that a pod would be taken if others took less."""


@dataclass(frozen=True)
class Failure:
    """Why a Job failed, and what its exit code says about another attempt."""

    reason: FailureReason
    message: str
    code: ExitCode


@dataclass(frozen=True)
class Trouble:
    """Why something does not get going. It may pass by itself."""

    reason: FailureReason | ConditionReason
    message: str


def failure_of(job: KubernetesObject, pods: Iterable[KubernetesObject]) -> Failure:
    """Say why a failed Job failed.

    Of several pods the one that failed first says it, unless it only lost its peers or was stopped.
    """
    failed = condition(job, "Failed") or {}
    if failed.get("reason") == "DeadlineExceeded":
        seconds = job.get("spec", {}).get("activeDeadlineSeconds")
        return Failure(
            FailureReason.DEADLINE_EXCEEDED,
            f"the Job took longer than {seconds} s: raise job.deadlineSeconds, or give it more resources",
            ExitCode.WRONG_INPUT,
        )
    found = [failure for pod in pods for failure in _pod_failures(pod)]
    if not found:
        message = str(failed.get("message") or "its pods are gone, and nothing is left of them")
        return Failure(FailureReason.INTERNAL_ERROR, f"the Job failed: {message}", ExitCode.BUG)
    found.sort(key=lambda entry: (entry[1].code in {ExitCode.PEER_LOST, ExitCode.STOPPED}, entry[0]))
    return found[0][1]


def trouble_of(
    owner: KubernetesObject, pods: tuple[KubernetesObject, ...], warnings: Mapping[str, str]
) -> Trouble | None:
    """Say why an unfinished Job, or a Deployment, does not get going; None: it does, or it just began."""
    spec = owner.get("spec", {})
    replicas = condition(owner, "ReplicaFailure")
    if replicas is not None:
        return _by_message(
            str(replicas.get("message", "")),
            FailureReason.POD_REFUSED,
            f"the API server takes no pod of {name_of(owner)}",
        )
    if spec.get("suspend"):
        return Trouble(ConditionReason.WAITING_FOR_CAPACITY, "waits until its queue admits it")
    for pod in pods:
        if pod_alive(pod) and not is_deleting(pod):
            trouble = _pod_trouble(pod, warnings)
            if trouble is not None:
                return trouble
    if not pods and uid_of(owner) in warnings:
        return _by_message(
            warnings[uid_of(owner)], FailureReason.POD_REFUSED, f"the API server takes no pod of {name_of(owner)}"
        )
    return None


def _pod_failures(pod: KubernetesObject) -> list[tuple[str, Failure]]:
    """Return (time, failure) of the container that speaks for the pod, or nothing."""
    server_died = _dead_server(pod)
    for container in containers(pod):
        ended = container.get("state", {}).get("terminated")
        if not ended or ended["exitCode"] == 0:
            continue
        if container["name"] != STAGE_CONTAINER and "message" not in ended and ended.get("reason") != "OOMKilled":
            continue  # a sidecar that was stopped with the pod
        failure = _container_failure(container["name"], ended)
        if failure.reason in {FailureReason.SERVER_FAILED, FailureReason.SERVER_TIMEOUT} and server_died:
            failure = server_died
        return [(str(ended.get("finishedAt", "")), failure)]
    status = pod.get("status", {})
    if status.get("phase") == "Failed" and status.get("reason"):
        message = f"pod {name_of(pod)}: {status['reason']}: {status.get('message', '')}".rstrip(": ")
        return [("", Failure(FailureReason.STOPPED, message, ExitCode.STOPPED))]
    return []


def _dead_server(pod: KubernetesObject) -> Failure | None:
    for container in containers(pod):
        if container["name"] == "server":
            for state in (container.get("state", {}), container.get("lastState", {})):
                ended = state.get("terminated", {})
                if ended.get("reason") == "OOMKilled":
                    return _out_of_memory("server")
                if ended.get("exitCode") == ExitCode.WRONG_INPUT:  # the plugin refuses: the next start would, too
                    said = str(ended.get("message") or "").strip()[-500:]
                    message = f"the server refuses its drafter or its arguments: {said or 'see its log'}"
                    return Failure(FailureReason.SERVER_FAILED, message, ExitCode.WRONG_INPUT)
    return None


def _container_failure(name: str, ended: Mapping[str, Any]) -> Failure:
    outcome = outcome_in(ended)
    if outcome is not None and outcome.failure is not None:
        return Failure(outcome.failure, outcome.message, EXIT_CODE_OF.get(outcome.failure, ExitCode.BUG))
    if ended.get("reason") == "OOMKilled":
        return _out_of_memory(name)
    number = int(ended["exitCode"])
    said = str(ended.get("message") or "").strip()[-500:]
    message = f"container {name} ended with exit code {number}: {said or 'its log says more'}"
    if number in {ExitCode.STOPPED, 137}:
        return Failure(FailureReason.STOPPED, message, ExitCode.STOPPED)
    if number == ExitCode.PEER_LOST:
        return Failure(FailureReason.PEER_LOST, message, ExitCode.PEER_LOST)
    if number in {ExitCode.WRONG_INPUT, ExitCode.TRY_AGAIN}:
        return Failure(FailureReason.INTERNAL_ERROR, message, ExitCode(number))
    return Failure(FailureReason.INTERNAL_ERROR, message, ExitCode.BUG)


def _out_of_memory(container: str) -> Failure:
    return Failure(
        FailureReason.OUT_OF_MEMORY,
        f"container {container} used more memory than its limit: raise resources.limits.memory in the job's template",
        ExitCode.WRONG_INPUT,
    )


def _pod_trouble(pod: KubernetesObject, warnings: Mapping[str, str]) -> Trouble | None:
    status = pod.get("status", {})
    scheduled = next((entry for entry in status.get("conditions", []) if entry["type"] == "PodScheduled"), None)
    if status.get("phase") == "Pending" and scheduled is not None and scheduled["status"] == "False":
        return _by_message(
            str(scheduled.get("message", "")), FailureReason.UNSCHEDULABLE, f"no node takes pod {name_of(pod)}"
        )
    for container in containers(pod):
        waiting = container.get("state", {}).get("waiting", {})
        reason, message = str(waiting.get("reason", "")), str(waiting.get("message", ""))
        if reason in PULL_REASONS:
            return Trouble(
                FailureReason.IMAGE_PULL,
                f"the image of container {container['name']} cannot be pulled: correct its name, or the pull secret "
                f"({message or reason})",
            )
        if reason in CONFIG_REASONS:
            return _by_message(message, FailureReason.POD_REFUSED, f"container {container['name']} cannot start")
        if reason == "CrashLoopBackOff":
            ended = container.get("lastState", {}).get("terminated")
            if ended:
                failure = _container_failure(container["name"], ended)
                return Trouble(
                    FailureReason.SERVER_FAILED if container["name"] == "server" else failure.reason, failure.message
                )
    warning = warnings.get(uid_of(pod))
    if warning is not None:
        return _by_message(warning, FailureReason.POD_REFUSED, "the pod cannot start")
    return None


def _by_message(message: str, reason: FailureReason, what: str) -> Trouble:
    """Recognise a lack of room, or a missing Secret or claim, in a sentence of the cluster's."""
    if NO_ROOM.search(message):
        return Trouble(
            ConditionReason.WAITING_FOR_CAPACITY,
            f"{what} until there is room, and then it goes on: {message}: if that lasts, add nodes or quota, or let "
            "others, such as servers, have less",
        )
    if re.search(r"persistentvolumeclaim \S+ not found", message):
        return Trouble(
            FailureReason.CLAIM_NOT_FOUND, f"{message}: create the PersistentVolumeClaim, or correct its name"
        )
    if re.search(r"\bsecret \S+ not found|couldn't find key \S+ in Secret|secrets? \S+ is forbidden", message):
        return Trouble(
            FailureReason.SECRET_NOT_FOUND, f"{message}: create the Secret with its keys, or correct its name"
        )
    return Trouble(reason, f"{what}: {message}")
