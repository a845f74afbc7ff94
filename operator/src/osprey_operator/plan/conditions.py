"""Conditions, whose transition time moves only with their status, and the one line that says what goes on."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from osprey_api.conditions import ConditionReason, ConditionType, FailureReason
from osprey_api.stages import StageName
from osprey_api.status import Condition, StageState, StageStatus

LINE_LIMIT = 140
"""Characters of the line in a printer column; the other conditions have the whole sentence."""


@dataclass
class Conditions:
    """The conditions of one resource in the making."""

    previous: Iterable[Condition]
    generation: int
    now: datetime
    made: dict[ConditionType, Condition] = field(default_factory=dict)

    def set(
        self,
        kind: ConditionType,
        status: bool | None,  # noqa: FBT001 - a condition's status is no flag
        reason: ConditionReason | FailureReason | str,
        message: str = "",
    ) -> None:
        """Say that a condition is true, false or, with None, not known."""
        word = "Unknown" if status is None else str(status)
        before = next((entry for entry in self.previous if entry.type == kind), None)
        since = before.last_transition_time if before is not None and before.status == word else self.now
        self.made[kind] = Condition.model_validate(
            {
                "type": kind.value,
                "status": word,
                "reason": str(reason),
                "message": message[:2000],
                "last_transition_time": since,
                "observed_generation": self.generation,
            }
        )

    def result(self) -> tuple[Condition, ...]:
        """Return the conditions, in the order of `ConditionType`."""
        return tuple(self.made[kind] for kind in ConditionType if kind in self.made)


@dataclass(frozen=True)
class Activity:
    """What goes on in a resource's stages."""

    progressing: bool
    reason: str
    message: str
    short: str = ""
    """A few words for a message that is long and in another condition anyway."""

    @property
    def line(self) -> str:
        """The message, short enough for a column."""
        if self.short:
            return self.short
        return self.message if len(self.message) <= LINE_LIMIT else f"{self.message[: LINE_LIMIT - 1]}…"


def activity(stages: Mapping[StageName, StageStatus]) -> Activity | None:
    """Say what goes on: first what failed, then what waits, then what runs; None: nothing does.

    A missing backbone comes before what the cluster lacks: no stage behind it can begin, whatever else is there.
    """
    running = [entry for entry in stages.values() if entry.state is StageState.RUNNING]
    for entry in stages.values():
        if entry.state in {StageState.FAILED, StageState.RETRYING}:
            again = entry.next_attempt_time
            when = f"; next attempt at {again:%H:%M:%S} UTC" if again is not None else ""
            return Activity(
                again is not None or bool(running), entry.reason, f"{entry.name} failed: {entry.message}{when}"
            )
    for urgent in (NO_BACKBONE, FAILURES):
        for entry in stages.values():
            if entry.state is StageState.PENDING and entry.reason in urgent:
                return Activity(True, entry.reason, f"{entry.name} waits: {entry.message}")
    if running:
        return Activity(True, ConditionReason.RUNNING, ", ".join(_progress(entry) for entry in running))
    for entry in stages.values():
        if entry.state is StageState.PENDING and entry.reason:
            words = _WAITS.get(entry.reason, "")
            return Activity(True, entry.reason, entry.message, short=words and f"{entry.name} {words}")
    for entry in stages.values():
        if entry.state is StageState.PENDING:
            return Activity(True, ConditionReason.PENDING, f"{entry.name} {entry.message or 'starting'}")
    return None


_WAITS: Mapping[str, str] = {
    ConditionReason.WAITING_FOR_CAPACITY: "waits for room",
    ConditionReason.WAITING_FOR_SHARED_STAGE: "runs for another resource",
}
FAILURES = frozenset(reason.value for reason in FailureReason)
NO_BACKBONE = frozenset({ConditionReason.BACKBONE_NOT_FOUND.value, ConditionReason.BACKBONE_FAILED.value})
"""Reasons to wait that only another resource can end."""


def _progress(entry: StageStatus) -> str:
    text = entry.name.value
    if entry.step is not None and entry.total_steps:
        text += f" {entry.step}/{entry.total_steps}"
    if entry.eta_seconds is not None:
        text += f", {_duration(entry.eta_seconds)} left"
    return text


def _duration(seconds: int) -> str:
    if seconds < 90:
        return f"{seconds} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"
