"""What a pass looks at, put together from what is known, and read again where that may not be enough."""

import asyncio
from collections.abc import Mapping
from datetime import datetime, timedelta

from osprey_api import backbone, drafter
from osprey_api.naming import LABEL_KIND
from osprey_api.status import StageState
from osprey_operator.api import Api
from osprey_operator.cache import Cache
from osprey_operator.children import (
    condition,
    containers,
    job_complete,
    job_finished,
    label,
    name_of,
    owner_uids,
    parse_time,
    pods_of,
    success_of,
    uid_of,
)
from osprey_operator.live import LiveMonitor
from osprey_operator.manifests.metadata import LABEL_OWNER_UID
from osprey_operator.manifests.stage_job import JOB_NAME_LABEL
from osprey_operator.state import KubernetesObject, Observed, Refusal

CHILDREN = ("Deployment", "Service", "ConfigMap")
STANDSTILL = timedelta(seconds=10)
"""A pod, or a Job without pods, that is older than this and does nothing may have a Warning event that says why."""
FEW = 3
"""Pods of one Job, or servers, whose events are asked for: of many that stand still one says why."""
SETTLING = timedelta(minutes=2)
"""For so long after a Job of somebody else has ended, its pods may not have been heard of."""


class Observer:
    """Builds `Observed` for a resource."""

    def __init__(self, api: Api, cache: Cache, live: LiveMonitor, *, resync_seconds: float) -> None:
        self._api = api
        self._cache = cache
        self._live = live
        self._resync = timedelta(seconds=resync_seconds)
        self._read_at: dict[str, datetime] = {}

    async def observe(self, resource: KubernetesObject, refusals: Mapping[str, Refusal], now: datetime) -> Observed:
        """Return all that a plan for the resource may look at.

        Raises:
            ApiError: the API server refuses to tell.
        """
        namespace, uid = resource["metadata"]["namespace"], uid_of(resource)
        await self._read_again(namespace, now)
        await self._read_pods_of_ended_jobs(resource, now)
        jobs = self._cache.of("Job", namespace)
        pods = self._cache.of("Pod", namespace)
        mine = [job for job in jobs if uid in owner_uids(job)]
        servers = tuple(pod for pod in pods if label(pod, LABEL_OWNER_UID) == uid)
        body = resource["spec"].get("backbone") if resource["kind"] == drafter.KIND else None
        progress = {uid_of(job): self._live.stage_progress(uid_of(job)) for job in mine}
        return Observed(
            jobs=jobs,
            pods=pods,
            children=tuple(
                child for kind in CHILDREN for child in self._cache.of(kind, namespace) if uid in owner_uids(child)
            ),
            warnings=await self._warnings(mine, pods, servers, now),
            backbone=self._cache.get(backbone.KIND, namespace, body) if body else None,
            progress={job: said for job, said in progress.items() if said is not None},
            traffic=self._live.traffic_of(resource) if resource["kind"] == drafter.KIND else None,
            refusals=refusals,
        )

    async def _read_again(self, namespace: str, now: datetime) -> None:
        """Now and then read all of a namespace anew: the deletion of something may never have been told.

        Not only a resource's own children: it may wait for a Job, or for pods, of another one.
        """
        last = self._read_at.setdefault(namespace, now)
        if now - last < self._resync:
            return
        self._read_at[namespace] = now
        for kind, labels in (
            *((kind, None) for kind in (backbone.KIND, drafter.KIND)),
            *((kind, LABEL_KIND) for kind in ("Job", "Pod", *CHILDREN)),
        ):
            known = self._cache.of(kind, namespace)
            self._cache.reconcile(known, await self._api.list(kind, namespace, labels=labels))

    async def _read_pods_of_ended_jobs(self, resource: KubernetesObject, now: datetime) -> None:
        """Read the pods of Jobs that ended and whose result is wanted: their watch may be behind that of the Jobs."""
        namespace, uid = resource["metadata"]["namespace"], uid_of(resource)
        settled = {
            entry.get("job")
            for entry in (resource.get("status") or {}).get("stages", [])
            if entry["state"] in {StageState.SUCCEEDED, StageState.FAILED, StageState.RETRYING}
        }
        for job in self._cache.of("Job", namespace):
            if not job_finished(job):
                continue
            mine = uid in owner_uids(job)
            if name_of(job) in settled if mine else not _just_completed(job, now):
                continue  # asked first: looking for a Job's pods goes over all there are
            known = pods_of(job, self._cache.of("Pod", namespace))
            if mine or success_of(known) is None:
                found = await self._api.list("Pod", namespace, labels=f"{JOB_NAME_LABEL}={name_of(job)}")
                self._cache.reconcile(known, found)

    async def _warnings(
        self,
        jobs: list[KubernetesObject],
        pods: tuple[KubernetesObject, ...],
        servers: tuple[KubernetesObject, ...],
        now: datetime,
    ) -> dict[str, str]:
        """Return why a resource's Jobs and servers stand still, where the newest event of one of them is a Warning."""
        groups: list[tuple[KubernetesObject, ...]] = [servers]
        groups += [
            pods_of(job, pods) or (job,) for job in jobs if not (job_finished(job) or job["spec"].get("suspend"))
        ]
        asked = [each for group in groups for each in [each for each in group if _stands_still(each, now)][:FEW]]
        answers = await asyncio.gather(*(self._newest_warning(each) for each in asked))
        return {uid_of(each): answer for each, answer in zip(asked, answers, strict=True) if answer}

    async def _newest_warning(self, each: KubernetesObject) -> str | None:
        """Return the newest event, if it is a Warning: an older one may be about what is over by now."""
        events = await self._api.list(
            "Event", each["metadata"]["namespace"], fields=f"involvedObject.uid={uid_of(each)}"
        )
        newest = max(events, key=_event_time, default={})
        return str(newest.get("message", "")) if newest.get("type") == "Warning" else None


def _event_time(event: KubernetesObject) -> datetime:
    """Return when an event was last seen: the scheduler and the kubelet say it in different fields."""
    said = (
        event.get("lastTimestamp"),
        (event.get("series") or {}).get("lastObservedTime"),
        event.get("eventTime"),
        event["metadata"]["creationTimestamp"],
    )
    return max(parse_time(moment) for moment in said if moment)


def _just_completed(job: KubernetesObject, now: datetime) -> bool:
    done = condition(job, "Complete")
    return job_complete(job) and done is not None and now - parse_time(done["lastTransitionTime"]) < SETTLING


def _stands_still(each: KubernetesObject, now: datetime) -> bool:
    """Tell whether a Job without pods, or a pod none of whose containers has begun, is old enough to ask about."""
    if now - parse_time(each["metadata"]["creationTimestamp"]) < STANDSTILL:
        return False
    if each["kind"] == "Job":
        return True
    if each.get("status", {}).get("phase") != "Pending" or condition(each, "PodScheduled") is None:
        return False  # one that no node takes says why in its own condition
    return all("waiting" in entry.get("state", {}) for entry in containers(each))
