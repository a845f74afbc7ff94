"""What the operator listens to. A handler puts an object into the cache and a key on the queue, and nothing else.

Only event handlers and indices are used: Kopf's change handlers, daemons and timers would write annotations and
finalizers to every resource, and an operator that was uninstalled would then block their deletion.
"""

from collections.abc import Callable, Coroutine
from typing import Any

import kopf

from osprey_api import backbone, drafter
from osprey_api.conditions import ConditionReason
from osprey_api.naming import ANNOTATION_RETRY, GROUP, LABEL_KIND, VERSION
from osprey_operator.cache import Cache
from osprey_operator.children import annotation, label, owner_uids, uid_of
from osprey_operator.manifests.metadata import LABEL_OWNER_UID
from osprey_operator.queue import Key, WorkQueue
from osprey_operator.state import KubernetesObject

KINDS = {backbone.KIND: backbone.PLURAL, drafter.KIND: drafter.PLURAL}
CHILDREN = {
    "Job": ("batch", "v1", "jobs"),
    "Pod": ("", "v1", "pods"),
    "Deployment": ("apps", "v1", "deployments"),
    "Service": ("", "v1", "services"),
    "ConfigMap": ("", "v1", "configmaps"),
}
"""Kinds of children that are watched, by the label that all of ours have."""


class Wakes:
    """Decides which resources an event concerns."""

    def __init__(self, cache: Cache, queue: WorkQueue) -> None:
        self._cache = cache
        self._queue = queue
        self._wishes: dict[str, tuple[object, ...]] = {}

    def resource(self, found: KubernetesObject, *, gone: bool) -> None:
        """One of our resources changed; its own status is no news to it, but a backbone's is to its drafters."""
        metadata = found["metadata"]
        wish = (metadata.get("generation"), annotation(found, ANNOTATION_RETRY), "deletionTimestamp" in metadata)
        if gone:
            self._wishes.pop(uid_of(found), None)
        if gone or self._wishes.get(uid_of(found)) != wish:
            self._queue.add(_key(found))
        if not gone:
            self._wishes[uid_of(found)] = wish
        if found["kind"] == backbone.KIND:
            for each in self._cache.of(drafter.KIND, metadata["namespace"]):
                if each["spec"].get("backbone") == metadata["name"]:
                    self._queue.add(_key(each))

    def child(self, found: KubernetesObject) -> None:
        """A child changed, or went: its owner is to look, and for a Job whoever waits for its result."""
        namespace = found["metadata"]["namespace"]
        owners = owner_uids(found) | {label(found, LABEL_OWNER_UID)}
        if found["kind"] == "Pod":
            for job in self._cache.of("Job", namespace):
                if uid_of(job) in owners:
                    owners = owners | owner_uids(job)
        for kind in KINDS:
            for each in self._cache.of(kind, namespace):
                if uid_of(each) in owners or (found["kind"] == "Job" and _waits_for_others(each)):
                    self._queue.add(_key(each))


def register(registry: kopf.OperatorRegistry, cache: Cache, queue: WorkQueue) -> None:
    """Register all handlers. The indices fill the cache before any handler is called, so no pass sees half of it."""
    wakes = Wakes(cache, queue)

    # Coroutines, though they wait for nothing: Kopf calls plain functions in threads.

    async def keep(body: kopf.Body, **_: Any) -> None:
        cache.put(dict(body))

    async def on_resource(event: kopf.RawEvent, **_: Any) -> None:
        found = dict(event["object"])
        if event["type"] == "DELETED":
            cache.drop(found)
        wakes.resource(found, gone=event["type"] == "DELETED")

    async def on_child(event: kopf.RawEvent, **_: Any) -> None:
        found = dict(event["object"])
        if event["type"] == "DELETED":
            cache.drop(found)
        wakes.child(found)

    for plural in KINDS.values():
        _listen(registry, (GROUP, VERSION, plural), keep, on_resource)
    for resource in CHILDREN.values():
        _listen(registry, resource, keep, on_child)


def configure(settings: kopf.OperatorSettings) -> None:
    """Set Kopf up: our children only, no events and no state of its own, nothing written to any object."""
    for resource in CHILDREN.values():
        settings.watching.label_selectors[resource] = LABEL_KIND
    settings.posting.enabled = False
    settings.scanning.disabled = True


def _listen(
    registry: kopf.OperatorRegistry,
    resource: tuple[str, str, str],
    keep: Callable[..., Coroutine[None, None, None]],
    handle: Callable[..., Coroutine[None, None, None]],
) -> None:
    name = resource[2]
    kopf.index(*resource, id=f"keep-{name}", registry=registry)(keep)
    kopf.on.event(*resource, id=f"on-{name}", registry=registry)(handle)


def _key(resource: KubernetesObject) -> Key:
    metadata = resource["metadata"]
    return Key(resource["kind"], metadata["namespace"], metadata["name"])


def _waits_for_others(resource: KubernetesObject) -> bool:
    entries = (resource.get("status") or {}).get("stages", [])
    return any(entry.get("reason") == ConditionReason.WAITING_FOR_SHARED_STAGE for entry in entries)
