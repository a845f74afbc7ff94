"""What to do about a resource: pure functions of the resource, of what was observed, and of the time."""

from datetime import datetime

from osprey_api.backbone import KIND as BACKBONE
from osprey_api.drafter import KIND as DRAFTER
from osprey_operator.plan.backbone import plan_backbone
from osprey_operator.plan.drafter import plan_drafter
from osprey_operator.state import KubernetesObject, Observed, Plan, Settings


def plan(resource: KubernetesObject, observed: Observed, now: datetime, settings: Settings) -> Plan:
    """Return what to do about a resource of either kind.

    Raises:
        ValueError: the resource is of another kind.
    """
    kind = resource["kind"]
    if kind == BACKBONE:
        return plan_backbone(resource, observed, now, settings)
    if kind == DRAFTER:
        return plan_drafter(resource, observed, now, settings)
    raise ValueError(f"{kind} is no kind of ours")
