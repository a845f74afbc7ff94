"""The stages of one resource, moved on one after the other: each against its Job, its pods and its last status.

A stage is known by its fingerprint. One whose status says that it succeeded is never looked at again, unless its
artifact is doubted; otherwise its Job is: absent, it is created; running, it is watched; ended, its result or its
failure is read, once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property

from osprey_api.backbone import OspreyBackboneSpec
from osprey_api.common import Storage
from osprey_api.conditions import ConditionReason, ExitCode, FailureReason
from osprey_api.drafter import OspreyDrafterSpec
from osprey_api.fingerprint import sha256
from osprey_api.naming import (
    LABEL_FINGERPRINT,
    LABEL_KIND,
    LABEL_NAME,
    LABEL_STAGE,
    stage_job_name,
)
from osprey_api.stages import (
    ArtifactRef,
    Execution,
    InputRole,
    Outcome,
    ResolveConfig,
    ResolveResult,
    StageConfig,
    StageName,
    StageTask,
    StorageLocation,
    stage_fingerprint,
)
from osprey_api.status import Resolved, StageState, StageStatus
from osprey_operator.children import (
    called,
    is_deleting,
    job_complete,
    job_failed,
    job_finished,
    job_seconds,
    label,
    name_of,
    owner_uids,
    parse_time,
    pod_alive,
    pods_of,
    stage_ended_at,
    success_of,
    template_hash,
    uid_of,
)
from osprey_operator.manifests.stage_job import DISTRIBUTED, stage_job
from osprey_operator.plan.failures import Failure, Trouble, failure_of, trouble_of
from osprey_operator.plan.results import metrics_of
from osprey_operator.state import Event, KubernetesObject, Observed, Owner, Settings

ACCESS = frozenset(
    {
        FailureReason.SOURCE_NOT_FOUND,
        FailureReason.SOURCE_ACCESS_DENIED,
        FailureReason.STORAGE_NOT_FOUND,
        FailureReason.STORAGE_ACCESS_DENIED,
        FailureReason.STORAGE_UNSUPPORTED,
        FailureReason.STORAGE_UNAVAILABLE,
        FailureReason.STORAGE_FULL,
        FailureReason.HUB_UNAVAILABLE,
    }
)
"""Somebody will create the bucket, correct the keys or bring the store back: tried again for as long as it takes."""

FROM_OUTSIDE = frozenset({ExitCode.STOPPED, ExitCode.PEER_LOST})
"""Evictions and lost nodes: no fault of the stage's, however often they come."""

SOURCE_FAULTS = frozenset({FailureReason.INVALID_DATA, FailureReason.SOURCE_NOT_FOUND, FailureReason.UNSUPPORTED_MODEL})
"""Somebody will correct the source: it is resolved again, and another content is another fingerprint."""

INPUT_FAULTS = frozenset({FailureReason.CORRUPT_ARTIFACT, FailureReason.SOURCE_NOT_FOUND})
"""What a stage reads is damaged or gone: whoever made it is asked first, and makes it anew if that is so."""

PRODUCERS: Mapping[StageName, tuple[StageName, ...]] = {
    StageName.PRETRAIN: (StageName.PRUNE, StageName.TOKENIZE),
    StageName.CONVERT: (StageName.REGENERATE,),
    StageName.CAPTURE: (StageName.REGENERATE,),
    StageName.DISTIL: (StageName.REGENERATE, StageName.CAPTURE, StageName.CONVERT),
    StageName.EVALUATE: (StageName.ADOPT, StageName.DISTIL, StageName.BASELINE),
}
"""The stages of the same resource whose artifacts a stage reads."""

SENTENCE_LIMIT = 2000

LEFTOVER_GRACE = timedelta(seconds=60)
"""A Job whose stage is done but which does not end, since a container of somebody else runs on, is removed then."""


@dataclass
class Pipeline:
    """The stages of a resource in the making: what their new status is and what there is to do."""

    owner: Owner
    spec: OspreyBackboneSpec | OspreyDrafterSpec
    storage: Storage
    previous: Mapping[StageName, StageStatus]
    generation_seen: int | None
    """`status.observedGeneration`: another generation may have corrected what failed."""
    asked_before: str
    """`status.asked`."""
    observed: Observed
    now: datetime
    settings: Settings

    statuses: dict[StageName, StageStatus] = field(default_factory=dict)
    create: list[KubernetesObject] = field(default_factory=list)
    delete: list[KubernetesObject] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    wake_at: list[datetime] = field(default_factory=list)
    wanted_jobs: set[str] = field(default_factory=set)
    """Names of the Jobs of the stages as they are wanted now."""
    kept_stages: set[StageName] = field(default_factory=set)
    """Stages whose Jobs are left alone, since what they should be is not known for a while."""

    def __post_init__(self) -> None:
        """Find the stages that made what another one could not read, where that one is to be tried again now."""
        self._distrusted: set[StageName] = set()
        for name, entry in self.previous.items():
            at = entry.next_attempt_time
            if entry.reason in INPUT_FAULTS and at is not None and at <= self.now:
                self._distrusted.update(PRODUCERS.get(name, ()))
        self.asked = self.asked_before

    # ------------------------------------------------------------------------------- asked by the plans

    def resolve(self, config: ResolveConfig, known: Resolved | None) -> Resolved | None:
        """Return the pinned inputs; None while they are not known for this spec."""
        task = self._task(config, {})
        self.asked = sha256([config.retry, self.storage.endpoint])
        done = all(entry.state is StageState.SUCCEEDED for entry in self.previous.values())
        if done and self.asked_before not in {"", self.asked}:
            self._doubt()  # before that a stage that misses an input says so itself, and one that runs is not disturbed
        before = self.previous.get(StageName.RESOLVE)
        if before is not None and before.fingerprint != task.fingerprint:
            # The user asked anew, by an edit or by the retry annotation: what had failed has another chance.
            self.previous = {
                name: entry
                for name, entry in self.previous.items()
                if entry.state not in {StageState.FAILED, StageState.RETRYING}
            }
            self.delete.extend(job for job in self.observed.jobs if self.is_mine(job) and job_failed(job))
        outcome = self._advance(task)
        if outcome is not None and isinstance(outcome.result, ResolveResult):
            found = outcome.result
            return Resolved(fingerprint=task.fingerprint, model=found.model, facts=found.facts, data=found.data)
        return known if known is not None and known.fingerprint == task.fingerprint else None

    def _doubt(self) -> None:
        """Have every finished stage look for its artifact again: that of a whole one ends at once."""
        self.previous = {
            name: entry if name is StageName.RESOLVE else entry.model_copy(update={"doubted": True})
            for name, entry in self.previous.items()
        }
        self.delete.extend(
            job for job in self.observed.jobs if self.is_mine(job) and label(job, LABEL_STAGE) != StageName.RESOLVE
        )

    def run(self, config: StageConfig, inputs: Mapping[InputRole, ArtifactRef] | None = None) -> ArtifactRef | None:
        """Move on a stage whose inputs are there; return its artifact once it is done."""
        self._advance(self._task(config, dict(inputs or {})))
        entry = self.statuses[config.stage]
        return entry.artifact if entry.state is StageState.SUCCEEDED else None

    def wait(self, *stages: StageName) -> None:
        """Stages wait for one before them: what they did with other inputs does not count."""
        for stage in stages:
            entry = StageStatus(name=stage, state=StageState.PENDING)
            before = self.previous.get(stage)
            if before is not None and (before.state is not StageState.SUCCEEDED or before.doubted):
                # Its inputs may well be the same in the end, and then its attempts count, and the doubt.
                kept = ("fingerprint", "attempts", "failures", "farthest_step", "doubted")
                entry = entry.model_copy(update={field: getattr(before, field) for field in kept})
            self.statuses[stage] = entry

    def keep(self, *stages: StageName, why: Trouble | None = None) -> None:
        """What stages should be is not known for a while: leave them as they are."""
        for stage in stages:
            entry = self.previous.get(stage) or StageStatus(name=stage, state=StageState.PENDING)
            self.kept_stages.add(stage)
            if entry.state is StageState.PENDING:
                reason, message = ("", "") if why is None else (why.reason.value, why.message[:SENTENCE_LIMIT])
                entry = entry.model_copy(update={"reason": reason, "message": message})
            self.statuses[stage] = entry

    def finish(self) -> None:
        """Delete what the resource no longer wants, and resolve again where a source was at fault."""
        going = {_mark(job) for job in self.create}
        for job in self.observed.jobs:
            if not self.is_mine(job):
                continue
            if name_of(job) in self.wanted_jobs or label(job, LABEL_STAGE) in self.kept_stages:
                going.add(_mark(job))
            elif not is_deleting(job):
                self.delete.append(job)
        for child in self.observed.children:
            if child["kind"] == "Service" and label(child, LABEL_STAGE) and _mark(child) not in going:
                self.delete.append(child)
        self._resolve_again_later()

    # ------------------------------------------------------------------------------- one stage

    def _task(self, config: StageConfig, inputs: dict[InputRole, ArtifactRef]) -> StageTask:
        return StageTask(
            fingerprint=stage_fingerprint(config, inputs),
            namespace=self.owner.namespace,
            resource=f"{self.owner.kind.lower()}/{self.owner.name}",
            storage=StorageLocation(uri=self.storage.uri, endpoint=self.storage.endpoint, region=self.storage.region),
            config=config,
            inputs=inputs,
            execution=self._execution(config.stage),
        )

    def _execution(self, stage: StageName) -> Execution:
        job = self.spec.job
        if stage in DISTRIBUTED:
            spread = Execution(
                nodes=job.nodes,
                processes_per_node=max(job.gpus_per_node, 1),
                zero_stage=job.zero_stage,
                checkpoint_every_steps=job.checkpoint_every_steps,
                checkpoints_kept=job.checkpoints_kept,
            )
            if not isinstance(self.spec, OspreyDrafterSpec):
                return spread
            # Only what the stage heeds: any change of its task starts a running Job anew.
            teacher = self.spec.distillation.teacher
            changes: dict[str, int] = {}
            if stage is StageName.CAPTURE:
                changes["captured_gib_limit"] = teacher.max_storage_gib
            if stage is StageName.CAPTURE or teacher.mode == "Online":
                changes["teacher_tensor_parallel"] = teacher.tensor_parallel
            return spread.model_copy(update=changes)
        if stage is StageName.REGENERATE and isinstance(self.spec, OspreyDrafterSpec):
            return Execution(concurrency=self.spec.regeneration.concurrency)
        return Execution()

    def _advance(self, task: StageTask) -> Outcome | None:
        """Set the stage's status and what there is to do for it; return its outcome if it was read just now."""
        before = self.previous.get(task.stage)
        if before is None or before.fingerprint != task.fingerprint or _lies_elsewhere(before, task):
            before = StageStatus(name=task.stage, fingerprint=task.fingerprint, state=StageState.PENDING)
        if task.stage in self._distrusted and before.state is StageState.SUCCEEDED:
            before = before.model_copy(update={"doubted": True})
        attempt = _Attempt(self, task, before)
        entry, outcome = attempt.advance()
        self.statuses[task.stage] = entry
        self.events.extend(_events(before, entry))
        if entry.next_attempt_time is not None and entry.next_attempt_time > self.now:
            self.wake_at.append(entry.next_attempt_time)
        return outcome

    def _resolve_again_later(self) -> None:
        entry = self.statuses.get(StageName.RESOLVE)
        if entry is None or entry.state is not StageState.SUCCEEDED:
            return
        at_fault = any(
            stage.state is StageState.FAILED and stage.reason in SOURCE_FAULTS and stage.name is not StageName.ADOPT
            for stage in self.statuses.values()
        )  # what is imported is named by its digest: resolving the target again would not change it
        if at_fault and entry.next_attempt_time is None:
            at = self.now + self.delay(entry.attempts)
            entry = entry.model_copy(update={"next_attempt_time": at})
            self.wake_at.append(at)
        elif not at_fault and (entry.next_attempt_time is not None or entry.attempts > 1):
            entry = entry.model_copy(update={"next_attempt_time": None, "attempts": 1})
        self.statuses[StageName.RESOLVE] = entry

    def delay(self, attempts: int) -> timedelta:
        """Return how long to wait after so many attempts: doubling, with a limit."""
        seconds = self.settings.retry_base_seconds * 2.0 ** min(max(attempts - 1, 0), 30)
        return timedelta(seconds=min(seconds, self.settings.retry_max_seconds))

    def is_mine(self, job: KubernetesObject) -> bool:
        """Tell whether a Job belongs to the resource."""
        return self.owner.uid in owner_uids(job)


class _Attempt:
    """One stage against its Job."""

    def __init__(self, pipeline: Pipeline, task: StageTask, before: StageStatus) -> None:
        self.pipeline = pipeline
        self.observed = pipeline.observed
        self.now = pipeline.now
        self.task = task
        self.before = before
        self.name = stage_job_name(pipeline.owner.name, task.stage, task.fingerprint)
        self.job = next(
            (job for job in self.observed.jobs if name_of(job) == self.name and pipeline.is_mine(job)), None
        )
        pipeline.wanted_jobs.add(self.name)

    @cached_property
    def objects(self) -> list[KubernetesObject]:
        """The Job as it is wanted now, and its Service where it has several pods."""
        return stage_job(
            owner=self.pipeline.owner,
            task=self.task,
            spec=self.pipeline.spec,
            storage=self.pipeline.storage,
            settings=self.pipeline.settings,
        )

    @cached_property
    def made(self) -> KubernetesObject:
        """The Job of `objects`."""
        return next(made for made in self.objects if made["kind"] == "Job")

    @property
    def content(self) -> str:
        """What the Job is made from."""
        return template_hash(self.made)

    def advance(self) -> tuple[StageStatus, Outcome | None]:
        """Return the stage's new status, and its outcome if it was read just now."""
        before, job = self.before, self.job
        if before.state is StageState.SUCCEEDED and not before.doubted and self._is_early():
            self._remove_leftover()
            return before, None
        if self.pipeline.spec.suspend:
            if job is not None and not job_finished(job):
                self._delete(job)
            return (self._pending() if before.state is StageState.RUNNING else before), None
        if job is None:
            return self._without_job()
        if is_deleting(job):
            self._look_again()
            return self._pending(), None
        accounted = before.state in {StageState.FAILED, StageState.RETRYING, StageState.SUCCEEDED}
        pods = pods_of(job, self.observed.pods)
        outcome = success_of(pods)
        if outcome is not None and before.state is not StageState.SUCCEEDED and self._fits(outcome):
            return self._succeeded(outcome, self.name), outcome
        if not job_finished(job):
            if template_hash(job) != self.content:
                self._delete(job)
                self._look_again()
                return self._pending(message="starts again with its new pod template, from its checkpoint"), None
            return self._running(job, pods), None
        if accounted and not before.doubted and template_hash(job) == self.content and self._is_early():
            return before, None
        lost = job_complete(job)
        if accounted or (lost and before.attempts <= 1):
            # Due for another attempt; or it ended well, but what it said is lost: the next one finds the manifest.
            self._delete(job)
            return self._start()
        failure = (
            Failure(FailureReason.INTERNAL_ERROR, "the Job ended well, but said no result that fits", ExitCode.BUG)
            if lost
            else failure_of(job, pods)
        )
        return self._failed(job, failure), None

    # --- without a Job

    def _without_job(self) -> tuple[StageStatus, Outcome | None]:
        before = self.before
        waits = before.state in {StageState.FAILED, StageState.RETRYING}
        if waits and self._is_early() and self.pipeline.generation_seen == self.pipeline.owner.generation:
            return before, None
        return self._start()

    def _start(self) -> tuple[StageStatus, Outcome | None]:
        for made in self.objects:
            refusal = self.observed.refusals.get(called(made))
            if refusal is None or refusal.content != template_hash(made) or self.now >= refusal.retry_at:
                continue
            return self._entry(
                StageState.RETRYING,
                reason=refusal.reason.value,
                message=refusal.message,
                next_attempt_time=refusal.retry_at,
            ), None
        if any(pod_alive(pod) for pod in self._pods_of_former_jobs()):
            self._look_again()
            return self._pending(message="waits until the pods of the last attempt are gone"), None
        shared = self._shared_job()
        if shared is not None:
            outcome = success_of(pods_of(shared, self.observed.pods))
            if outcome is not None and self._fits(outcome) and not self.before.doubted:
                return self._succeeded(outcome, name_of(shared)), outcome
            owner = f"{label(shared, LABEL_KIND)} {label(shared, LABEL_NAME)}"
            return self._pending(
                reason=ConditionReason.WAITING_FOR_SHARED_STAGE.value,
                message=f"the same stage runs for {owner}: its result is shared",
            ), None
        self.pipeline.create.extend(self.objects)
        return self._pending(attempts=self.before.attempts + 1, job=self.name), None

    def _pods_of_former_jobs(self) -> list[KubernetesObject]:
        """Return the pods of ended attempts at this stage: two at once would fight over the checkpoints.

        A resource that shared its Job may be gone, and its pods still be saving theirs.
        """
        others = {uid_of(job) for job in self.observed.jobs if not self.pipeline.is_mine(job) and not is_deleting(job)}
        return [pod for pod in self.observed.pods if _mark(pod) == _mark(self.made) and not owner_uids(pod) & others]

    def _shared_job(self) -> KubernetesObject | None:
        """Return another resource's Job of the same fingerprint that may yet give the result."""
        for job in sorted(self.observed.jobs, key=name_of):
            if self.pipeline.is_mine(job) or is_deleting(job) or job_failed(job):
                continue
            if _mark(job) != _mark(self.made):
                continue
            pods = pods_of(job, self.observed.pods)
            if job_complete(job):
                outcome = success_of(pods)
                if outcome is not None and self._fits(outcome) and not self.before.doubted:
                    return job
                continue
            trouble = trouble_of(job, pods, self.observed.warnings)
            if trouble is None or trouble.reason in {
                FailureReason.UNSCHEDULABLE,
                ConditionReason.WAITING_FOR_CAPACITY,
            }:
                return job
        return None

    # --- with a Job

    def _running(self, job: KubernetesObject, pods: tuple[KubernetesObject, ...]) -> StageStatus:
        self.pipeline.wake_at.append(self.now + timedelta(seconds=self.pipeline.settings.poll_seconds))
        attempts = max(self.before.attempts, 1)
        # Its pod was not asked yet, or not reached, or has just ended: what it said last still stands.
        said_last = {
            name: getattr(self.before, name) for name in ("step", "total_steps", "eta_seconds", "loss", "metrics")
        }
        trouble = trouble_of(job, pods, self.observed.warnings)
        if trouble is not None:
            entry = self._pending(
                attempts=attempts, job=self.name, reason=trouble.reason.value, message=trouble.message
            )
            return entry.model_copy(update=said_last)
        if not any(pod.get("status", {}).get("phase") == "Running" for pod in pods):
            return self._pending(attempts=attempts, job=self.name).model_copy(update=said_last)
        said = self.observed.progress.get(job["metadata"]["uid"])
        entry = self._entry(StageState.RUNNING, attempts=attempts, job=self.name)
        if said is None:
            return entry.model_copy(update=said_last)
        return entry.model_copy(
            update={
                "step": said.step,
                "total_steps": said.total_steps,
                "eta_seconds": None if said.eta_seconds is None else round(said.eta_seconds),
                "loss": None if said.loss is None else round(said.loss, 4),
                "metrics": {
                    name: round(value, 3)
                    for name in ("tokens_per_second", "simulated_acceptance_length")
                    if (value := getattr(said, name)) is not None
                },
            }
        )

    def _failed(self, job: KubernetesObject, failure: Failure) -> StageStatus:
        attempts = max(self.before.attempts, 1)
        step, farthest = self.before.step, self.before.farthest_step or 0
        got_further = step is not None and step > farthest
        # The time alone would not do: a fault that shows late would take the GPUs for ever.
        excused = job_seconds(job) >= self.pipeline.settings.settled_seconds and (
            got_further or failure.code in FROM_OUTSIDE
        )
        failures = self.before.failures + (not excused)
        passing = failure.code is not ExitCode.WRONG_INPUT
        again = (
            self.task.stage is StageName.RESOLVE
            or failure.reason in ACCESS
            or (passing and (excused or failures <= self.pipeline.spec.job.retries))
        )
        at = self.now + self.pipeline.delay(1 if excused else failures)
        return self._entry(
            StageState.RETRYING if again and passing else StageState.FAILED,
            attempts=attempts,
            failures=failures,
            farthest_step=step if got_further else self.before.farthest_step,
            job=self.name,
            reason=failure.reason.value,
            message=failure.message,
            next_attempt_time=at if again else None,
        )

    def _succeeded(self, outcome: Outcome, job: str) -> StageStatus:
        steps = self.before.total_steps
        return self._entry(
            StageState.SUCCEEDED,
            attempts=max(self.before.attempts, int(job == self.name)),
            failures=0,
            farthest_step=None,
            doubted=False,
            job=job,
            step=steps,
            total_steps=steps,
            artifact=outcome.artifact,
            metrics=metrics_of(outcome),
        )

    def _fits(self, outcome: Outcome) -> bool:
        """Tell whether an outcome is this stage's, in this resource's storage."""
        if outcome.result is None or outcome.result.stage is not self.task.stage:
            return False
        if outcome.artifact is None:
            return self.task.stage is StageName.RESOLVE
        return outcome.artifact.uri == self.task.prefix

    def _remove_leftover(self) -> None:
        if self.job is None or job_finished(self.job):
            return
        ended = stage_ended_at(pods_of(self.job, self.observed.pods))
        if not ended:
            return
        at = parse_time(ended) + LEFTOVER_GRACE
        if self.now >= at:
            self._delete(self.job)
        else:
            self.pipeline.wake_at.append(at)

    # --- words

    def _is_early(self) -> bool:
        """Tell whether the time of the next attempt has not come, or never will."""
        at = self.before.next_attempt_time
        return at is None or self.now < at

    def _delete(self, job: KubernetesObject) -> None:
        if not is_deleting(job):
            self.pipeline.delete.append(job)

    def _look_again(self) -> None:
        self.pipeline.wake_at.append(self.now + timedelta(seconds=2))

    def _pending(
        self, *, attempts: int | None = None, job: str | None = None, reason: str = "", message: str = ""
    ) -> StageStatus:
        return self._entry(StageState.PENDING, attempts=attempts, job=job, reason=reason, message=message)

    def _entry(
        self,
        state: StageState,
        *,
        attempts: int | None = None,
        job: str | None = None,
        message: str = "",
        **more: object,
    ) -> StageStatus:
        return StageStatus.model_validate(
            {
                "name": self.task.stage,
                "fingerprint": self.task.fingerprint,
                "state": state,
                "attempts": self.before.attempts if attempts is None else attempts,
                "failures": self.before.failures,
                "farthest_step": self.before.farthest_step,
                "doubted": self.before.doubted,
                "job": self.before.job if job is None else job,
                "message": message[:SENTENCE_LIMIT],
                **more,
            }
        )


def _mark(child: KubernetesObject) -> tuple[str, str]:
    return label(child, LABEL_STAGE), label(child, LABEL_FINGERPRINT)


def _lies_elsewhere(entry: StageStatus, task: StageTask) -> bool:
    """Tell whether a finished artifact lies in a storage that the resource no longer names."""
    return entry.artifact is not None and entry.artifact.uri != task.prefix


def _events(before: StageStatus, after: StageStatus) -> list[Event]:
    if before.state is after.state and before.reason == after.reason:
        return []
    stage = after.name.value.capitalize()
    if after.state is StageState.SUCCEEDED:
        return [Event("Normal", f"{stage}Succeeded", f"{after.name} is done")]
    if after.state is StageState.RUNNING and before.state is not StageState.RUNNING:
        return [Event("Normal", f"{stage}Started", f"{after.name} runs as Job {after.job}, attempt {after.attempts}")]
    if after.state in {StageState.FAILED, StageState.RETRYING}:
        return [Event("Warning", f"{stage}Failed", f"{after.reason}: {after.message}"[:1000])]
    if after.reason in {reason.value for reason in FailureReason}:
        return [Event("Warning", f"{stage}Pending", f"{after.reason}: {after.message}"[:1000])]
    return []
