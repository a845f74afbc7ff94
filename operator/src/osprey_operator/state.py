"""The values that flow through one pass: settings, whose children, what was seen, and what to do about it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from osprey_api.common import Storage
from osprey_api.conditions import FailureReason
from osprey_api.naming import GROUP

KubernetesObject = dict[str, Any]
"""A Kubernetes object as its JSON: untyped here, since the API server knows better what it may hold."""

ANNOTATION_APPLIED = f"{GROUP}/applied-hash"
"""On every child that is applied: the hash of what was applied, so that it is applied again only when that changes."""


@dataclass(frozen=True)
class Settings:
    """What whoever installs the operator decides. `settings.from_environment` reads it; tests build it."""

    namespaces: tuple[str, ...] = ()
    """Namespaces to watch; empty: all."""
    trainer_image: str = "osprey-trainer:latest"
    """Runs resolve, prune, tokenize, pretrain, convert and distil."""
    serving_image: str = "osprey-serving:latest"
    """Runs regenerate, baseline, evaluate, fetch, sync and the plugin's installation."""
    sglang_image: str = "lmsysorg/sglang:v0.5.23"
    """The stock server, where a drafter names no other."""
    sglang_version: str = "0.5.23"
    """Version of `sglang_image`: it is part of the fingerprint of what that server answered."""
    image_pull_policy: str = "IfNotPresent"
    """Of every container of ours."""
    pod_template: Mapping[str, Any] = field(default_factory=dict)
    """PodTemplateSpec fragment merged into every pod, before the resource's own."""
    storage: Storage | None = None
    """For resources that name none."""
    workers: int = 8
    """Resources that are worked on at once."""
    poll_seconds: float = 10.0
    """Between two passes over a resource with a running stage, for its progress."""
    resync_seconds: float = 300.0
    """Between two passes over a resource that waits on a child and hears nothing."""
    retry_base_seconds: float = 20.0
    """Delay before the first new attempt at something that failed; it doubles with each one."""
    retry_max_seconds: float = 300.0
    """The longest such delay."""
    settled_seconds: float = 1800.0
    """An attempt that ran this long and got further, or was ended from outside, does not use up a retry."""


@dataclass(frozen=True)
class Owner:
    """The resource that a child belongs to."""

    api_version: str
    kind: str
    name: str
    namespace: str
    uid: str
    generation: int

    def owner_reference(self) -> KubernetesObject:
        """Return the entry of a child's `metadata.ownerReferences` by which it is deleted with its owner."""
        return {
            "apiVersion": self.api_version,
            "kind": self.kind,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": False,
        }


@dataclass(frozen=True)
class StageProgress:
    """What a running stage's pod says of itself; unset: it does not say."""

    step: int | None = None
    total_steps: int | None = None
    eta_seconds: float | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    simulated_acceptance_length: float | None = None


@dataclass(frozen=True)
class Traffic:
    """What the servers of a drafter did in the window, all of them together."""

    verify_steps: int
    acceptance_length: float | None
    """Tokens over verify steps; None: no verify step in the window."""
    tokens_per_second: float | None


@dataclass(frozen=True)
class Refusal:
    """Why the API server did not take a child."""

    reason: FailureReason
    message: str
    content: str
    """Hash of the refused child: another content is tried at once."""
    retry_at: datetime


@dataclass(frozen=True)
class Observed:
    """All that a plan may look at, beside the resource itself."""

    jobs: tuple[KubernetesObject, ...] = ()
    """Stage Jobs of the namespace: the resource's own, and those of others, whose results it may share."""
    pods: tuple[KubernetesObject, ...] = ()
    """Pods of those Jobs and of the resource's servers."""
    children: tuple[KubernetesObject, ...] = ()
    """The resource's own Deployments, Services and ConfigMaps."""
    warnings: Mapping[str, str] = field(default_factory=dict)
    """UID of a Job or pod that does not get going -> message of its newest Warning event."""
    backbone: KubernetesObject | None = None
    """The OspreyBackbone that a drafter names, if it is there."""
    progress: Mapping[str, StageProgress] = field(default_factory=dict)
    """UID of a Job -> what its pod says."""
    traffic: Traffic | None = None
    refusals: Mapping[str, Refusal] = field(default_factory=dict)
    """Kind and name of a child that the API server refused -> why."""


@dataclass(frozen=True)
class Event:
    """A Kubernetes event about the resource, for `kubectl describe`."""

    kind: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True)
class Plan:
    """What to do, in this order, and when to look again."""

    delete: tuple[KubernetesObject, ...] = ()
    create: tuple[KubernetesObject, ...] = ()
    """Made once and never changed: Jobs, and the headless Services beside them."""
    admin_secret: str | None = None
    """Name of the Secret with the servers' admin key, to be made if it is not there."""
    apply: tuple[KubernetesObject, ...] = ()
    status: KubernetesObject = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    requeue_after: float | None = None
    """Seconds; None: only when something changes."""
