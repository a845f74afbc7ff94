"""The only writer: carries a plan out, and tells what the API server would not take."""

import logging
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from osprey_api.conditions import FailureReason
from osprey_api.naming import LABEL_FINGERPRINT, LABEL_STAGE, MANAGED_BY
from osprey_operator.api import Api, ApiError
from osprey_operator.cache import Cache
from osprey_operator.children import annotation, called, label, name_of, owner_uids, template_hash, uid_of
from osprey_operator.manifests.server import admin_secret
from osprey_operator.state import ANNOTATION_APPLIED, Event, KubernetesObject, Owner, Plan

logger = logging.getLogger(__name__)

REFUSALS = frozenset({400, 403, 404, 409, 413, 422})
"""Answers that say that the object, the quota or the namespace has to change; any other error is tried again."""


@dataclass(frozen=True)
class Refused:
    """A child that the API server would not take."""

    child: str
    """Its kind and name."""
    content: str
    reason: FailureReason
    message: str


@dataclass(frozen=True)
class Done:
    """What came of a plan."""

    refused: tuple[Refused, ...] = ()
    overtaken: bool = False
    """Another resource began the same stage meanwhile: look again."""


class Executor:
    """Carries plans out."""

    def __init__(self, api: Api, cache: Cache) -> None:
        self._api = api
        self._cache = cache
        self._starting: set[tuple[str, str, str]] = set()

    async def act(self, plan: Plan, owner: Owner, seen: Iterable[KubernetesObject]) -> Done:
        """Delete, create and apply as planned.

        Args:
            plan: what to do.
            owner: for whom.
            seen: the Jobs that the plan was made from.

        Raises:
            ApiError: the API server has a problem of its own; nothing was lost, and the pass is made again.
        """
        refused: list[Refused] = []
        overtaken = False
        stopped: set[tuple[str, str, str]] = set()
        known = {uid_of(job) for job in seen}
        for child in plan.delete:
            await self._api.delete(child)
            self._cache.drop(child)
            logger.info("%s: %s deleted", owner.name, called(child))
        for child in plan.create:
            mark = (owner.namespace, label(child, LABEL_STAGE), label(child, LABEL_FINGERPRINT))
            if mark in stopped:
                continue  # without the Service before it the pods of a Job would never meet
            if mark in self._starting or self._began_elsewhere(child, owner, known):
                overtaken = True
                continue
            self._starting.add(mark)
            try:
                found = await self._create(child, owner)
            finally:
                self._starting.discard(mark)
            if found:
                refused += found
                stopped.add(mark)
        if plan.admin_secret is not None:
            refused += await self._create(admin_secret(owner, secrets.token_urlsafe(32)), owner)
        for child in plan.apply:
            refused += await self._apply(child, owner)
        return Done(tuple(refused), overtaken=overtaken)

    async def write_status(self, resource: KubernetesObject, status: KubernetesObject) -> bool:
        """Write a resource's status if it is another one; tell whether it was."""
        if status == (resource.get("status") or {}):
            return False
        written = await self._api.replace_status(resource, status)
        if written is None:
            self._cache.drop(resource)
            return False
        self._cache.put(written)
        return True

    async def emit(self, resource: KubernetesObject, event: Event, now: str) -> None:
        """Record an event; one that is lost is no reason to fail."""
        metadata = resource["metadata"]
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{metadata['name'][:200]}.", "namespace": metadata["namespace"]},
            "involvedObject": {
                "apiVersion": resource["apiVersion"],
                "kind": resource["kind"],
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": metadata["uid"],
            },
            "type": event.kind,
            "reason": event.reason,
            "message": event.message[:1000],
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
            "source": {"component": MANAGED_BY},
        }
        try:
            await self._api.create(body)
        except ApiError as error:
            logger.warning("%s: an event was not taken: %s", metadata["name"], error)

    async def _create(self, child: KubernetesObject, owner: Owner) -> list[Refused]:
        try:
            made = await self._api.create(child)
        except ApiError as error:
            if error.status == 409 and child["kind"] == "Secret":
                return []  # made before: no other one has its name
            if error.status == 409:
                return await self._taken(child, owner)
            if error.status in REFUSALS:
                return [_refused(child, template_hash(child), error)]
            raise
        logger.info("%s: %s created", owner.name, called(child))
        self._put(made)
        return []

    async def _apply(self, child: KubernetesObject, owner: Owner) -> list[Refused]:
        known = self._cache.get(child["kind"], owner.namespace, name_of(child))
        if known is None or owner.uid not in owner_uids(known):
            taken = await self._taken(child, owner)
            if taken:
                return taken
        try:
            self._put(await self._api.apply(child))
        except ApiError as error:
            if error.status in REFUSALS:
                return [_refused(child, annotation(child, ANNOTATION_APPLIED), error)]
            raise
        logger.info("%s: %s applied", owner.name, called(child))
        return []

    async def _taken(self, child: KubernetesObject, owner: Owner) -> list[Refused]:
        """Tell whether somebody else's object has a child's name."""
        found = await self._api.get(child["kind"], owner.namespace, name_of(child))
        if found is None:
            return []
        if owner.uid in owner_uids(found):
            self._put(found)
            return []
        message = f"{called(child)} exists and is not this resource's: delete it, or give the resource another name"
        return [Refused(called(child), _content(child), FailureReason.NAME_TAKEN, message)]

    def _began_elsewhere(self, child: KubernetesObject, owner: Owner, known: set[str]) -> bool:
        """Tell whether another resource's Job of the same stage began after the plan was made."""
        return any(
            uid_of(job) not in known
            and owner.uid not in owner_uids(job)
            and all(label(job, key) == label(child, key) for key in (LABEL_STAGE, LABEL_FINGERPRINT))
            for job in self._cache.of("Job", owner.namespace)
        )

    def _put(self, made: Any) -> None:
        if made["kind"] != "Secret":
            self._cache.put(made)


def _content(child: KubernetesObject) -> str:
    return annotation(child, ANNOTATION_APPLIED) or template_hash(child)


def _refused(child: KubernetesObject, content: str, error: ApiError) -> Refused:
    return Refused(called(child), content, FailureReason.POD_REFUSED, f"the API server refuses it: {error.message}")
