"""One pass over one resource: observe, plan, execute, write status."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from osprey_api import backbone, drafter
from osprey_operator.cache import Cache
from osprey_operator.children import called, is_deleting, uid_of
from osprey_operator.execute import Executor, Refused
from osprey_operator.observe import Observer
from osprey_operator.plan import plan
from osprey_operator.plan.common import owner_of
from osprey_operator.queue import Key
from osprey_operator.state import Refusal, Settings

logger = logging.getLogger(__name__)

SOON_SECONDS = 1.0


@dataclass(frozen=True)
class _Known:
    """A refusal, and how many in a row there were."""

    refusal: Refusal
    count: int


class Reconciler:
    """Makes passes."""

    def __init__(
        self,
        *,
        cache: Cache,
        observer: Observer,
        executor: Executor,
        settings: Settings,
        clock: Callable[[], datetime],
    ) -> None:
        self._cache = cache
        self._observer = observer
        self._executor = executor
        self._settings = settings
        self._clock = clock
        self._refusals: dict[str, dict[str, _Known]] = {}

    async def reconcile(self, key: Key) -> float | None:
        """Bring a resource one step further; return the seconds until the next look, or None.

        Raises:
            ApiError: the API server has a problem; the pass can be made again.
        """
        resource = self._cache.get(key.kind, key.namespace, key.name)
        if resource is None or is_deleting(resource):
            self._forget_gone()  # its children are deleted with it by their owner references
            return None
        owner = owner_of(resource)
        now = self._clock().replace(microsecond=0)
        known = self._refusals.get(owner.uid, {})
        observed = await self._observer.observe(resource, {child: entry.refusal for child, entry in known.items()}, now)
        planned = plan(resource, observed, now, self._settings)
        done = await self._executor.act(planned, owner, observed.jobs)
        if done.overtaken:
            return SOON_SECONDS
        tried = {called(child) for child in (*planned.create, *planned.apply)} | {f"Secret {planned.admin_secret}"}
        for child in tried - {refused.child for refused in done.refused}:
            known.pop(child, None)
        if done.refused:
            known.update({refused.child: self._remembered(refused, known, now) for refused in done.refused})
            self._refusals[owner.uid] = known
            refusals = {child: entry.refusal for child, entry in known.items()}
            planned = plan(resource, replace(observed, refusals=refusals), now, self._settings)
        if await self._executor.write_status(resource, planned.status):
            stamp = now.strftime("%Y-%m-%dT%H:%M:%SZ")
            for event in planned.events:
                level = logging.WARNING if event.kind == "Warning" else logging.INFO
                logger.log(level, "%s: %s: %s", key, event.reason, event.message)
                await self._executor.emit(resource, event, stamp)
        return planned.requeue_after

    def _forget_gone(self) -> None:
        there = {uid_of(each) for kind in (backbone.KIND, drafter.KIND) for each in self._cache.everywhere(kind)}
        self._refusals = {uid: known for uid, known in self._refusals.items() if uid in there}

    def _remembered(self, refused: Refused, known: dict[str, _Known], now: datetime) -> _Known:
        before = known.get(refused.child)
        same = before is not None and before.refusal.content == refused.content
        count = before.count + 1 if before is not None and same else 1
        seconds = min(self._settings.retry_base_seconds * 2.0 ** min(count - 1, 30), self._settings.retry_max_seconds)
        logger.warning("%s: refused, next attempt in %.0f s: %s", refused.child, seconds, refused.message)
        return _Known(
            Refusal(
                reason=refused.reason,
                message=refused.message,
                content=refused.content,
                retry_at=now + timedelta(seconds=seconds),
            ),
            count,
        )
