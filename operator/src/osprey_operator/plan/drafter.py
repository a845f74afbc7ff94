"""The plan of an `OspreyDrafter`: from its target and its prompts to servers that draft, or to why not."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from pydantic import ValidationError

from osprey_api.backbone import KIND as BACKBONE
from osprey_api.common import ImportedArtifact, Storage
from osprey_api.conditions import ConditionReason, ConditionType
from osprey_api.drafter import (
    AcceptanceStatus,
    OspreyDrafterSpec,
    OspreyDrafterStatus,
    Revision,
    RevisionState,
    ThroughputStatus,
)
from osprey_api.naming import SERVER_PORT
from osprey_api.stages import ArtifactRef, InputRole, StageName
from osprey_api.status import Resolved, StageState, StageStatus
from osprey_operator.manifests.server import admin_secret_name, server_objects
from osprey_operator.plan import gate, stages
from osprey_operator.plan.backbone import NO_STORAGE
from osprey_operator.plan.backbone import previous_status as backbone_status
from osprey_operator.plan.common import (
    SUSPENDED,
    in_order,
    invalid,
    owner_of,
    refused,
    resync,
    seconds_until,
    set_resolved,
    set_suspended,
)
from osprey_operator.plan.conditions import FAILURES, Activity, Conditions, activity
from osprey_operator.plan.failures import Trouble
from osprey_operator.plan.pipeline import Pipeline
from osprey_operator.plan.results import acceptance_status, throughput_status
from osprey_operator.plan.rollout import Rollout, left_alone, roll_out, serves_drafter, withdraw
from osprey_operator.state import Event, KubernetesObject, Observed, Plan, Settings, Traffic

LEAST_VERIFY_STEPS = 100
"""Fewer than these in the window, and live acceptance length is not shown, where `adaptation` does not say."""


@dataclass(frozen=True)
class Training:
    """What the stages have come to."""

    resolved: Resolved | None
    drafter: ArtifactRef | None
    measured: str | None = None
    """How the drafter was evaluated, as `stages.measured` says; None: it was not yet."""
    waits: Trouble | None = None
    """Why what is to be trained is not known for a while."""


def plan_drafter(resource: KubernetesObject, observed: Observed, now: datetime, settings: Settings) -> Plan:
    """Return what to do about an OspreyDrafter."""
    status = previous_status(resource)
    try:
        spec = OspreyDrafterSpec.model_validate(resource["spec"])
    except ValidationError as error:
        return invalid(resource, status.conditions, error, now)
    storage = spec.storage or settings.storage
    if storage is None:
        return refused(resource, status.conditions, NO_STORAGE, now)
    owner = owner_of(resource)
    pipeline = Pipeline(
        owner=owner,
        spec=spec,
        storage=storage,
        previous={entry.name: entry for entry in status.stages},
        generation_seen=status.observed_generation,
        asked_before=status.asked,
        observed=observed,
        now=now,
        settings=settings,
    )
    resolved = pipeline.resolve(stages.resolve_drafter(resource, owner, spec), status.resolved)
    if spec.import_ is None:
        training = _train(pipeline, spec, resolved, observed, settings)
        finisher, finished = StageName.DISTIL, ConditionReason.SUCCEEDED
    else:
        training = _adopt(pipeline, spec, spec.import_, resolved, settings)
        finisher, finished = StageName.ADOPT, ConditionReason.IMPORTED
    pipeline.finish()

    conditions = Conditions(status.conditions, owner.generation, now)
    set_suspended(conditions, suspended=spec.suspend)
    set_resolved(conditions, pipeline.statuses[StageName.RESOLVE], known=resolved is not None)
    _set_stage(conditions, ConditionType.TRAINED, pipeline.statuses[finisher], finished)
    _set_stage(conditions, ConditionType.EVALUATED, pipeline.statuses[StageName.EVALUATE])
    verdict = _judged(spec, status, training, pipeline.statuses[StageName.EVALUATE])
    _set_gate(conditions, status, verdict, pipeline.statuses[StageName.EVALUATE])
    revisions = _with_verdict(pipeline, status, training, verdict, serving=spec.serving is not None)

    wanted = gate.accepted(revisions) if spec.serving is not None else None
    rollout = _serve(pipeline, spec, status, training, wanted)
    if wanted is not None and rollout.complete and not rollout.left_alone:
        revisions = gate.with_rollout(revisions, wanted.artifact)
    _set_serving(conditions, spec, wanted, rollout)
    live = _live(spec, observed.traffic)
    acceptance, throughput = _measured(spec, status, pipeline.statuses[StageName.EVALUATE], live)
    _set_adaptation(conditions, spec, wanted, live)
    doing = _doing(spec, activity(pipeline.statuses), training.waits, verdict, rollout)
    if doing is not None:
        conditions.set(ConditionType.READY, False, doing.reason, doing.message)
    else:
        doing = Activity(False, ConditionReason.COMPLETE, "serving" if wanted is not None else "complete")
        conditions.set(ConditionType.READY, True, ConditionReason.COMPLETE, "")
    conditions.set(ConditionType.PROGRESSING, doing.progressing, doing.reason, doing.line)

    made = conditions.result()
    new = OspreyDrafterStatus(
        observed_generation=owner.generation,
        conditions=made,
        resolved=resolved or status.resolved,
        asked=pipeline.asked,
        stages=in_order(pipeline.statuses),
        artifact=training.drafter or status.artifact,
        revisions=gate.kept(revisions, spec.revision_history_limit),
        acceptance_length=acceptance,
        tokens_per_second=throughput,
        endpoint=rollout.endpoint,
    )
    moments = [*pipeline.wake_at, *rollout.wake_at]
    unfinished = any(condition.type == ConditionType.READY and condition.status != "True" for condition in made)
    again = resync(observed, settings, now)
    if again is not None and unfinished:
        moments.append(again)
    if rollout.available:  # for what its servers say of their traffic
        moments.append(now + timedelta(seconds=settings.poll_seconds))
    return Plan(
        delete=(*pipeline.delete, *rollout.delete),
        create=tuple(pipeline.create),
        admin_secret=rollout.secret,
        apply=rollout.apply,
        status=new.model_dump(mode="json", exclude_none=True),
        events=(*pipeline.events, *_events(status, new)),
        requeue_after=seconds_until(moments, now),
    )


def previous_status(resource: KubernetesObject) -> OspreyDrafterStatus:
    """Return the status as written last; an empty one where another version wrote what cannot be read."""
    try:
        return OspreyDrafterStatus.model_validate(resource.get("status") or {})
    except ValidationError:
        return OspreyDrafterStatus()


# ------------------------------------------------------------------------------------------------ stages


def _train(
    pipeline: Pipeline, spec: OspreyDrafterSpec, resolved: Resolved | None, observed: Observed, settings: Settings
) -> Training:
    """Move the stages on. Baseline and captured states need no drafter, so they come beside the others."""
    captures = spec.distillation.teacher.mode == "Captured"
    capture = (StageName.CAPTURE,) if captures else ()
    later = (StageName.CONVERT, StageName.DISTIL, StageName.EVALUATE)
    if resolved is None:
        pipeline.keep(StageName.REGENERATE, *capture, *later, StageName.BASELINE)
        return Training(None, None)
    answers = pipeline.run(stages.regenerate(spec, resolved, settings))
    baseline = pipeline.run(stages.baseline(spec, resolved, settings))
    states = None
    if captures:
        if answers is None:
            pipeline.wait(StageName.CAPTURE)
        else:
            states = pipeline.run(stages.capture(spec, resolved), {InputRole.ANSWERS: answers})
    backbone = _backbone(pipeline, spec, observed)
    if isinstance(backbone, Trouble):
        pipeline.keep(*later, why=backbone)
        return Training(resolved, None, waits=backbone)
    if answers is None:
        pipeline.wait(*later)
        return Training(resolved, None)
    inputs = {InputRole.ANSWERS: answers}
    if backbone is not None:
        inputs[InputRole.BACKBONE] = backbone
    initial = pipeline.run(stages.convert(spec, resolved), inputs)
    if initial is None or (captures and states is None):
        pipeline.wait(StageName.DISTIL, StageName.EVALUATE)
        return Training(resolved, None)
    taught = {InputRole.DRAFTER: initial, InputRole.ANSWERS: answers}
    if states is not None:
        taught[InputRole.STATES] = states
    drafter = pipeline.run(stages.distil(spec, resolved), taught)
    return _evaluate(pipeline, spec, resolved, settings, drafter=drafter, baseline=baseline)


def _adopt(
    pipeline: Pipeline,
    spec: OspreyDrafterSpec,
    imported: ImportedArtifact,
    resolved: Resolved | None,
    settings: Settings,
) -> Training:
    """Move on the stages of a drafter that is imported in place of trained."""
    if resolved is None:
        pipeline.keep(StageName.ADOPT, StageName.EVALUATE, StageName.BASELINE)
        return Training(None, None)
    finished = ArtifactRef(uri=imported.uri.rstrip("/"), digest=imported.digest)
    drafter = pipeline.run(stages.adopt(resolved), {InputRole.DRAFTER: finished})
    if drafter is None:  # no server is started for what may not fit; one that measures already goes on
        pipeline.keep(StageName.BASELINE)
        pipeline.wait(StageName.EVALUATE)
        return Training(resolved, None)
    baseline = pipeline.run(stages.baseline(spec, resolved, settings))
    return _evaluate(pipeline, spec, resolved, settings, drafter=drafter, baseline=baseline)


def _evaluate(
    pipeline: Pipeline,
    spec: OspreyDrafterSpec,
    resolved: Resolved,
    settings: Settings,
    *,
    drafter: ArtifactRef | None,
    baseline: ArtifactRef | None,
) -> Training:
    if drafter is None or baseline is None:
        pipeline.wait(StageName.EVALUATE)
        return Training(resolved, drafter)
    evaluation = stages.evaluate(spec, resolved, settings)
    report = pipeline.run(evaluation, {InputRole.DRAFTER: drafter, InputRole.BASELINE: baseline})
    return Training(resolved, drafter, measured=None if report is None else stages.measured(evaluation))


def _backbone(pipeline: Pipeline, spec: OspreyDrafterSpec, observed: Observed) -> ArtifactRef | Trouble | None:
    """Return the finished backbone; None where the drafter has none; why there is none yet."""
    if spec.backbone is None:
        return None
    if observed.backbone is None:
        return Trouble(
            ConditionReason.BACKBONE_NOT_FOUND,
            f"{BACKBONE} {spec.backbone} does not exist in this namespace: create it, or correct spec.backbone",
        )
    status = backbone_status(observed.backbone)
    ready = next((entry for entry in status.conditions if entry.type == ConditionType.READY), None)
    current = status.observed_generation == observed.backbone["metadata"]["generation"]
    if ready is not None and ready.status == "True" and current and status.artifact is not None:
        theirs, ours = _endpoint(observed.backbone, pipeline), pipeline.storage.endpoint
        if theirs != ours:  # an artifact is named by its bucket alone
            return Trouble(
                ConditionReason.BACKBONE_FAILED,
                f"{BACKBONE} {spec.backbone} lies in the store at {theirs or 'AWS'}, and this drafter's storage is at "
                f"{ours or 'AWS'}: give both the same storage.endpoint",
            )
        return status.artifact
    if ready is not None and ready.reason in FAILURES:
        return Trouble(
            ConditionReason.BACKBONE_FAILED,
            f"{BACKBONE} {spec.backbone} is not ready ({ready.reason}): kubectl describe it",
        )
    return Trouble(ConditionReason.WAITING_FOR_BACKBONE, f"waits for {BACKBONE} {spec.backbone}")


def _endpoint(backbone: KubernetesObject, pipeline: Pipeline) -> str | None:
    """Return where a backbone lies; an imported one is read wherever its drafter has its own storage."""
    storage: KubernetesObject | None = backbone["spec"].get("storage")
    if "import" in backbone["spec"]:
        return pipeline.storage.endpoint
    if storage is not None:
        return storage.get("endpoint")
    return None if pipeline.settings.storage is None else pipeline.settings.storage.endpoint


def _set_stage(
    conditions: Conditions,
    kind: ConditionType,
    entry: StageStatus,
    done: ConditionReason = ConditionReason.SUCCEEDED,
) -> None:
    if entry.state is StageState.SUCCEEDED:
        conditions.set(kind, True, done, "")
    elif entry.state is StageState.RUNNING:
        conditions.set(kind, False, ConditionReason.RUNNING, "")
    else:
        conditions.set(kind, False, entry.reason or ConditionReason.PENDING, entry.message)


# ------------------------------------------------------------------------------------------------ gate


def _judged(
    spec: OspreyDrafterSpec, status: OspreyDrafterStatus, training: Training, evaluation: StageStatus
) -> gate.Verdict | None:
    """Judge the drafter that was evaluated for this very spec; None: there is none."""
    if training.drafter is None or training.measured is None:
        return None
    rival = gate.served(status.revisions, other_than=training.drafter) if spec.serving is not None else None
    return gate.judge(evaluation.metrics, spec.evaluation.gate, rival, training.measured)


def _set_gate(
    conditions: Conditions, status: OspreyDrafterStatus, verdict: gate.Verdict | None, evaluation: StageStatus
) -> None:
    before = next((entry for entry in status.conditions if entry.type == ConditionType.GATE_PASSED), None)
    if verdict is not None:
        conditions.set(ConditionType.GATE_PASSED, verdict.passed, verdict.reason, verdict.message)
    elif evaluation.state is StageState.SUCCEEDED and before is not None and before.status != "Unknown":
        # Whether this evaluation is still the wanted one is not known for a while; what it said still holds.
        conditions.set(ConditionType.GATE_PASSED, before.status == "True", before.reason, before.message)
    else:
        conditions.set(ConditionType.GATE_PASSED, None, ConditionReason.PENDING, "not evaluated yet")


def _with_verdict(
    pipeline: Pipeline,
    status: OspreyDrafterStatus,
    training: Training,
    verdict: gate.Verdict | None,
    *,
    serving: bool,
) -> tuple[Revision, ...]:
    evaluation = pipeline.statuses[StageName.EVALUATE]
    if verdict is None or training.drafter is None or training.measured is None or training.resolved is None:
        return status.revisions
    candidate = Revision(
        artifact=training.drafter,
        evaluation=evaluation.fingerprint,
        measured=training.measured,
        target=training.resolved.model,
        storage=pipeline.storage,
        acceptance_length=round(evaluation.metrics["acceptance_length"], 3),
        acceptance_length_corpus=round(evaluation.metrics["acceptance_length_corpus"], 3),
        state=RevisionState.REJECTED,
    )
    return gate.with_candidate(status.revisions, candidate, passed=verdict.passed, serving=serving)


# ------------------------------------------------------------------------------------------------ serving


def _serve(
    pipeline: Pipeline,
    spec: OspreyDrafterSpec,
    status: OspreyDrafterStatus,
    training: Training,
    wanted: Revision | None,
) -> Rollout:
    """Serve the wanted drafter, with the target that it was measured with; the target alone until there is one."""
    if spec.serving is None:
        return withdraw(pipeline.observed)
    owner, observed, storage = pipeline.owner, pipeline.observed, pipeline.storage
    resolved = training.resolved
    target = wanted.target if wanted is not None else None
    if target is None and resolved is not None:
        target = resolved.model
    # Without a verdict a status without revisions may be one that was lost: its drafter is found again in a while.
    lost = wanted is None and training.measured is None and serves_drafter(observed)
    if target is None or lost:
        before = next((entry for entry in status.conditions if entry.type == ConditionType.ROLLED_OUT), None)
        return left_alone(owner, observed, rolled_out=before is not None and before.status == "True")
    if wanted is not None and wanted.storage is not None and not _lies_in(storage, wanted):
        storage = wanted.storage  # the new one has nothing to fetch before the stages have filled it
    return roll_out(
        owner,
        server_objects(
            owner=owner,
            spec=spec,
            target=target,
            drafter=wanted.artifact if wanted is not None else None,
            storage=storage,
            settings=pipeline.settings,
            admin_key_secret=admin_secret_name(owner),
        ),
        admin_secret_name(owner),
        observed,
        pipeline.now,
    )


def _lies_in(storage: Storage, revision: Revision) -> bool:
    """Tell whether a revision's artifact lies in a storage, whose keys may be others by now."""
    where = revision.storage
    same_store = where is None or where.endpoint == storage.endpoint
    return same_store and revision.artifact.uri.startswith(f"{storage.uri.rstrip('/')}/")


def _set_serving(conditions: Conditions, spec: OspreyDrafterSpec, wanted: Revision | None, rollout: Rollout) -> None:
    if spec.serving is None:
        message = "spec.serving is unset"
        conditions.set(ConditionType.AVAILABLE, False, ConditionReason.NOT_REQUESTED, message)
        conditions.set(ConditionType.ROLLED_OUT, False, ConditionReason.NOT_REQUESTED, message)
        return
    trouble = rollout.trouble
    if rollout.available:
        conditions.set(ConditionType.AVAILABLE, True, ConditionReason.SUCCEEDED, "")
    elif trouble is not None:
        conditions.set(ConditionType.AVAILABLE, False, trouble.reason, trouble.message)
    else:
        conditions.set(ConditionType.AVAILABLE, False, ConditionReason.SERVER_NOT_READY, "no server answers yet")
    if trouble is not None:
        conditions.set(ConditionType.ROLLED_OUT, False, trouble.reason, trouble.message)
    elif rollout.left_alone and not rollout.complete:
        message = "nothing changes at the servers until it is known what they should serve"
        conditions.set(ConditionType.ROLLED_OUT, False, ConditionReason.ROLLING_OUT, message)
    elif not rollout.complete:
        message = f"{rollout.updated} of {rollout.wanted} servers are as wanted"
        conditions.set(ConditionType.ROLLED_OUT, False, ConditionReason.ROLLING_OUT, message)
    elif wanted is None:
        message = "the target is served without a drafter until one passes the gate"
        conditions.set(ConditionType.ROLLED_OUT, False, ConditionReason.SERVING_WITHOUT_DRAFTER, message)
    else:
        conditions.set(ConditionType.ROLLED_OUT, True, ConditionReason.COMPLETE, "")


# ------------------------------------------------------------------------------------------------ live


@dataclass(frozen=True)
class Live:
    """What the servers' traffic says."""

    acceptance_length: float | None
    tokens_per_second: float | None
    told: bool = False
    """A server told its metrics."""


def _live(spec: OspreyDrafterSpec, traffic: Traffic | None) -> Live:
    if spec.serving is None or traffic is None:
        return Live(None, None)
    least = spec.adaptation.min_verify_steps if spec.adaptation is not None else LEAST_VERIFY_STEPS
    enough = traffic.verify_steps >= least and traffic.acceptance_length is not None
    speed = traffic.tokens_per_second
    return Live(
        acceptance_length=round(traffic.acceptance_length, 2)
        if enough and traffic.acceptance_length is not None
        else None,
        tokens_per_second=None if speed is None else round(speed, 1),
        told=True,
    )


def _measured(
    spec: OspreyDrafterSpec, status: OspreyDrafterStatus, evaluation: StageStatus, live: Live
) -> tuple[AcceptanceStatus | None, ThroughputStatus | None]:
    """Return the figures of the last evaluation, which stay while the next one is made, with the live ones."""
    if evaluation.state is StageState.SUCCEEDED:
        return (
            acceptance_status(evaluation.metrics, stages.evaluated_domains(spec), live.acceptance_length),
            throughput_status(evaluation.metrics, live.tokens_per_second),
        )
    acceptance = status.acceptance_length or AcceptanceStatus()
    throughput = status.tokens_per_second or ThroughputStatus()
    acceptance = acceptance.model_copy(update={"live": live.acceptance_length})
    throughput = throughput.model_copy(update={"live": live.tokens_per_second})
    return (
        None if acceptance == AcceptanceStatus() else acceptance,
        None if throughput == ThroughputStatus() else throughput,
    )


def _set_adaptation(conditions: Conditions, spec: OspreyDrafterSpec, wanted: Revision | None, live: Live) -> None:
    """Hold live traffic against the evaluation of the drafter that serves, which need not be the last one."""
    if spec.adaptation is None or spec.serving is None:
        return
    if wanted is None:
        message = "no drafter is served"
        conditions.set(ConditionType.ACCEPTANCE_DEGRADED, None, ConditionReason.SERVING_WITHOUT_DRAFTER, message)
        return
    if not live.told:
        message = (
            f"no server tells its metrics on port {SERVER_PORT}: where servers are ready, check that network policies "
            "let the operator in"
        )
        conditions.set(ConditionType.ACCEPTANCE_DEGRADED, None, ConditionReason.SERVERS_SILENT, message)
        return
    if live.acceptance_length is None:
        message = f"fewer than {spec.adaptation.min_verify_steps} verify steps in {spec.adaptation.window_seconds} s"
        conditions.set(ConditionType.ACCEPTANCE_DEGRADED, None, ConditionReason.NOT_ENOUGH_TRAFFIC, message)
        return
    evaluated = wanted.acceptance_length_corpus
    drop = 1 - live.acceptance_length / evaluated
    degraded = drop > spec.adaptation.max_acceptance_drop
    conditions.set(
        ConditionType.ACCEPTANCE_DEGRADED,
        degraded,
        ConditionReason.BELOW_EVALUATED if degraded else ConditionReason.AS_EVALUATED,
        f"live acceptance length is more than {spec.adaptation.max_acceptance_drop:.0%} below the evaluated "
        f"{evaluated:g}: the traffic is not what the drafter was trained for"
        if degraded
        else "",
    )


# ------------------------------------------------------------------------------------------------ in the end


def _doing(
    spec: OspreyDrafterSpec,
    stages_do: Activity | None,
    waits: Trouble | None,
    verdict: gate.Verdict | None,
    rollout: Rollout,
) -> Activity | None:
    """Say in one line what keeps the drafter from being ready; None: nothing does."""
    if spec.suspend and verdict is None:
        return SUSPENDED
    if stages_do is not None:
        return stages_do
    if waits is not None:
        return Activity(True, waits.reason, waits.message)
    if verdict is not None and not verdict.passed:
        return Activity(False, verdict.reason, f"rejected: {verdict.message}")
    if spec.serving is None or rollout.complete:
        return None
    if rollout.trouble is not None:
        return Activity(True, rollout.trouble.reason, f"rollout waits: {rollout.trouble.message}")
    return Activity(True, ConditionReason.ROLLING_OUT, f"rolling out, {rollout.updated} of {rollout.wanted} servers")


def _events(before: OspreyDrafterStatus, after: OspreyDrafterStatus) -> list[Event]:
    """Tell of what became of drafters, and of a fall of the live acceptance length."""
    events = []
    states = {revision.artifact.digest: revision.state for revision in before.revisions}
    for revision in after.revisions:
        if states.get(revision.artifact.digest) is not revision.state:
            kind = RevisionState.REJECTED
            events.append(
                Event(
                    "Warning" if revision.state is kind else "Normal",
                    f"Drafter{revision.state}",
                    f"drafter {revision.artifact.digest[7:19]}, acceptance length {revision.acceptance_length:g}",
                )
            )
    for condition in after.conditions:
        old = next((entry for entry in before.conditions if entry.type == condition.type), None)
        degraded = condition.type == ConditionType.ACCEPTANCE_DEGRADED and condition.status == "True"
        if degraded and (old is None or old.status != "True"):
            events.append(Event("Warning", condition.reason, condition.message))
    return events
