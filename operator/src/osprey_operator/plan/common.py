"""What the plans of both kinds begin and end with."""

from collections.abc import Iterable
from datetime import datetime, timedelta

from pydantic import ValidationError

from osprey_api.conditions import ConditionReason, ConditionType, FailureReason
from osprey_api.naming import API_VERSION
from osprey_api.stages import StageName
from osprey_api.status import Condition, StageState, StageStatus
from osprey_operator.plan.conditions import Activity, Conditions
from osprey_operator.state import KubernetesObject, Observed, Owner, Plan, Settings


def owner_of(resource: KubernetesObject) -> Owner:
    """Return a resource as the owner of its children."""
    metadata = resource["metadata"]
    return Owner(
        api_version=API_VERSION,
        kind=resource["kind"],
        name=metadata["name"],
        namespace=metadata["namespace"],
        uid=metadata["uid"],
        generation=metadata["generation"],
    )


def invalid(
    resource: KubernetesObject, conditions: tuple[Condition, ...], error: ValidationError, now: datetime
) -> Plan:
    """Return the plan for a spec that this operator cannot read: one of another version's schema."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return refused(
        resource, conditions, f"spec.{where}: {first['msg']}; update the CRDs and the operator together", now
    )


def refused(resource: KubernetesObject, previous: tuple[Condition, ...], message: str, now: datetime) -> Plan:
    """Return the plan for a resource that cannot be worked on before somebody changes something."""
    generation = resource["metadata"]["generation"]
    conditions = Conditions(previous, generation, now)
    for kind in (ConditionType.RESOLVED, ConditionType.PROGRESSING, ConditionType.READY):
        conditions.set(kind, False, FailureReason.INVALID_CONFIG, message)
    before = dict(resource.get("status") or {})
    kept = [
        entry.model_dump(mode="json", exclude_none=True)
        for entry in previous
        if entry.type not in {condition.type for condition in conditions.result()}
    ]
    made = [entry.model_dump(mode="json", exclude_none=True) for entry in conditions.result()]
    return Plan(status={**before, "observedGeneration": generation, "conditions": [*made, *kept]})


def set_resolved(conditions: Conditions, entry: StageStatus, *, known: bool) -> None:
    """Tell whether the external inputs are pinned."""
    if entry.state in {StageState.FAILED, StageState.RETRYING}:
        conditions.set(ConditionType.RESOLVED, False, entry.reason, entry.message)
    elif known:
        conditions.set(ConditionType.RESOLVED, True, ConditionReason.SUCCEEDED, "")
    else:
        conditions.set(ConditionType.RESOLVED, False, entry.reason or ConditionReason.RESOLVING, entry.message)


def set_suspended(conditions: Conditions, *, suspended: bool) -> None:
    """Tell whether the user stopped the Jobs."""
    if suspended:
        message = "spec.suspend is true: no Job runs, checkpoints are kept"
        conditions.set(ConditionType.SUSPENDED, True, ConditionReason.SUSPENDED, message)
    else:
        conditions.set(ConditionType.SUSPENDED, False, ConditionReason.NOT_SUSPENDED, "")


SUSPENDED = Activity(False, ConditionReason.SUSPENDED, "suspended")


def in_order(statuses: dict[StageName, StageStatus]) -> tuple[StageStatus, ...]:
    """Return the stages as `StageName` has them."""
    return tuple(statuses[name] for name in StageName if name in statuses)


def seconds_until(moments: Iterable[datetime], now: datetime) -> float | None:
    """Return the seconds until the first of some moments, at least one; None: there is none."""
    first = min(moments, default=None)
    return None if first is None else max((first - now).total_seconds(), 1.0)


def resync(observed: Observed, settings: Settings, now: datetime) -> datetime | None:
    """Return when to look again at a resource that waits on children: what is known of them may be out of date."""
    return now + timedelta(seconds=settings.resync_seconds) if observed.jobs or observed.children else None
