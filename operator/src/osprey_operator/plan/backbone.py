"""The plan of an `OspreyBackbone`: resolve, prune and tokenize, pretrain; or import."""

from datetime import datetime

from pydantic import ValidationError

from osprey_api.backbone import OspreyBackboneSpec, OspreyBackboneStatus
from osprey_api.conditions import ConditionReason, ConditionType
from osprey_api.stages import ArtifactRef, InputRole, StageName
from osprey_api.status import Resolved
from osprey_operator.children import owner_uids
from osprey_operator.plan import stages
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
from osprey_operator.plan.conditions import Activity, Conditions, activity
from osprey_operator.plan.pipeline import Pipeline
from osprey_operator.state import KubernetesObject, Observed, Plan, Settings

NO_STORAGE = "no storage: set spec.storage, or storage in the values of the operator's chart"


def plan_backbone(resource: KubernetesObject, observed: Observed, now: datetime, settings: Settings) -> Plan:
    """Return what to do about an OspreyBackbone."""
    status = previous_status(resource)
    try:
        spec = OspreyBackboneSpec.model_validate(resource["spec"])
    except ValidationError as error:
        return invalid(resource, status.conditions, error, now)
    owner = owner_of(resource)
    conditions = Conditions(status.conditions, owner.generation, now)
    set_suspended(conditions, suspended=spec.suspend)
    if spec.import_ is not None:
        for kind in (ConditionType.RESOLVED, ConditionType.READY):
            conditions.set(kind, True, ConditionReason.IMPORTED, "")
        conditions.set(ConditionType.PROGRESSING, False, ConditionReason.IMPORTED, "imported")
        imported = ArtifactRef(uri=spec.import_.uri.rstrip("/"), digest=spec.import_.digest)
        jobs = (job for job in observed.jobs if owner.uid in owner_uids(job))
        made = (*jobs, *observed.children)  # while it still had a source
        return Plan(delete=made, status=_status(owner.generation, conditions, artifact=imported))
    storage = spec.storage or settings.storage
    if storage is None:
        return refused(resource, status.conditions, NO_STORAGE, now)

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
    resolved = pipeline.resolve(stages.resolve_backbone(resource, owner, spec), status.resolved)
    artifact = _run(pipeline, spec, resolved)
    pipeline.finish()

    set_resolved(conditions, pipeline.statuses[StageName.RESOLVE], known=resolved is not None)
    doing = activity(pipeline.statuses) or Activity(False, ConditionReason.COMPLETE, "complete")
    if artifact is not None:
        conditions.set(ConditionType.READY, True, ConditionReason.COMPLETE, "")
    else:
        doing = SUSPENDED if spec.suspend else doing
        conditions.set(ConditionType.READY, False, doing.reason, doing.message)
    conditions.set(ConditionType.PROGRESSING, doing.progressing, doing.reason, doing.line)
    again = resync(observed, settings, now) if artifact is None else None
    return Plan(
        delete=tuple(pipeline.delete),
        create=tuple(pipeline.create),
        status=_status(
            owner.generation,
            conditions,
            artifact=artifact or status.artifact,
            resolved=resolved or status.resolved,
            asked=pipeline.asked,
            stages=in_order(pipeline.statuses),
        ),
        events=tuple(pipeline.events),
        requeue_after=seconds_until([*pipeline.wake_at, *([again] if again else [])], now),
    )


def previous_status(resource: KubernetesObject) -> OspreyBackboneStatus:
    """Return the status as written last; an empty one where another version wrote what cannot be read.

    Nothing is lost by that: a stage whose artifact exists returns it at once.
    """
    try:
        return OspreyBackboneStatus.model_validate(resource.get("status") or {})
    except ValidationError:
        return OspreyBackboneStatus()


def _run(pipeline: Pipeline, spec: OspreyBackboneSpec, resolved: Resolved | None) -> ArtifactRef | None:
    """Move the stages on, and return the finished backbone."""
    training = spec.pretraining
    if resolved is None:
        pipeline.keep(StageName.PRUNE)
        if training is not None:
            pipeline.keep(StageName.TOKENIZE, StageName.PRETRAIN)
        return None
    pruned = pipeline.run(stages.prune(spec, resolved))
    if training is None:
        return pruned
    tokens = pipeline.run(stages.tokenize(training, resolved))
    if pruned is None or tokens is None:
        pipeline.wait(StageName.PRETRAIN)
        return None
    return pipeline.run(stages.pretrain(training), {InputRole.BACKBONE: pruned, InputRole.TOKENS: tokens})


def _status(
    generation: int, conditions: Conditions, *, artifact: ArtifactRef | None, **more: object
) -> KubernetesObject:
    status = OspreyBackboneStatus.model_validate(
        {"observed_generation": generation, "conditions": conditions.result(), "artifact": artifact, **more}
    )
    return status.model_dump(mode="json", exclude_none=True)
