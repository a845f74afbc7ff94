"""Whether a finished drafter may be served, and what became of the ones before it."""

from collections.abc import Mapping
from dataclasses import dataclass

from osprey_api.conditions import ConditionReason
from osprey_api.drafter import Gate, Revision, RevisionState
from osprey_api.stages import ArtifactRef
from osprey_operator.plan.results import speedup

ACCEPTED = frozenset({RevisionState.SERVING, RevisionState.ROLLING_OUT})


@dataclass(frozen=True)
class Verdict:
    """What the gate says of a drafter."""

    passed: bool
    reason: ConditionReason
    message: str


def judge(metrics: Mapping[str, float], gate: Gate, rival: Revision | None, measured: str) -> Verdict:
    """Hold an evaluation against the gate and against the revision that is served now, if it is another one.

    Args:
        metrics: of the evaluation.
        gate: what is asked.
        rival: the revision that is served.
        measured: how the evaluation was made, as `stages.measured` says: only figures of the same kind are compared.
    """
    faster = speedup(dict(metrics))
    length = metrics["acceptance_length"]
    identical = metrics["identical_outputs"]
    if identical < gate.min_identical_outputs:
        return Verdict(
            False,
            ConditionReason.OUTPUTS_DIFFER,
            f"{identical:.1%} of the outputs equal those without a drafter, the gate asks for "
            f"{gate.min_identical_outputs:.1%}",
        )
    if length < gate.min_acceptance_length:
        return Verdict(
            False,
            ConditionReason.ACCEPTANCE_TOO_LOW,
            f"acceptance length {length:.3f} is {gate.min_acceptance_length - length:.3f} below "
            f"minAcceptanceLength {gate.min_acceptance_length:g}",
        )
    if faster < gate.min_speedup:
        return Verdict(
            False,
            ConditionReason.TOO_SLOW,
            f"speed-up {faster:.3f} is {gate.min_speedup - faster:.3f} below minSpeedup {gate.min_speedup:g}",
        )
    message = f"acceptance length {length:.3f}, speed-up {faster:.3f}, {identical:.1%} identical"
    if rival is not None and rival.measured != measured:
        message += (
            f"; not held against the served revision's {rival.acceptance_length:.3f}, which was measured with other "
            "prompts, limits, speculation or another server"
        )
    elif rival is not None and length < rival.acceptance_length * (1 - gate.max_regression):
        return Verdict(
            False,
            ConditionReason.REGRESSED,
            f"acceptance length {length:.3f} is {1 - length / rival.acceptance_length:.1%} below the served "
            f"revision's {rival.acceptance_length:.3f}, maxRegression allows {gate.max_regression:.1%}",
        )
    return Verdict(True, ConditionReason.PASSED, message)


def accepted(revisions: tuple[Revision, ...]) -> Revision | None:
    """Return the revision that is served, or on its way to be."""
    return next((revision for revision in revisions if revision.state in ACCEPTED), None)


def served(revisions: tuple[Revision, ...], *, other_than: ArtifactRef) -> Revision | None:
    """Return the revision that is served, unless it is the given drafter."""
    return next(
        (
            revision
            for revision in revisions
            if revision.state is RevisionState.SERVING and revision.artifact.digest != other_than.digest
        ),
        None,
    )


def with_candidate(
    revisions: tuple[Revision, ...], candidate: Revision, *, passed: bool, serving: bool
) -> tuple[Revision, ...]:
    """Return the revisions with a newly judged drafter in front, whatever state it comes in.

    One that is served already stays so, with the target that it serves, when a later evaluation fails it: the
    condition tells, and nothing better is at hand.
    """
    digest = candidate.artifact.digest
    before = next((revision for revision in revisions if revision.artifact.digest == digest), None)
    if before is not None and before.state is RevisionState.SERVING and serving:
        state = RevisionState.SERVING
        if not passed and before.target is not None:
            candidate = candidate.model_copy(update={"target": before.target})
    elif not passed:
        state = RevisionState.REJECTED
    else:
        state = RevisionState.ROLLING_OUT if serving else RevisionState.EXPORTED
    candidate = candidate.model_copy(update={"state": state})
    rest = tuple(revision for revision in revisions if revision.artifact.digest != digest)
    if state is RevisionState.ROLLING_OUT:  # one on its way is overtaken; one that is served is until it is replaced
        rest = tuple(
            revision.model_copy(update={"state": RevisionState.SUPERSEDED})
            if revision.state is RevisionState.ROLLING_OUT
            else revision
            for revision in rest
        )
    return (candidate, *rest)


def with_rollout(revisions: tuple[Revision, ...], drafter: ArtifactRef) -> tuple[Revision, ...]:
    """Return the revisions after all servers have turned to a drafter."""

    def turned(revision: Revision) -> Revision:
        if revision.artifact.digest == drafter.digest:
            return revision.model_copy(update={"state": RevisionState.SERVING})
        if revision.state in ACCEPTED:
            return revision.model_copy(update={"state": RevisionState.SUPERSEDED})
        return revision

    return tuple(turned(revision) for revision in revisions)


def kept(revisions: tuple[Revision, ...], limit: int) -> tuple[Revision, ...]:
    """Return the newest revisions, with the served one among them whatever its age."""
    newest = revisions[:limit]
    in_use = [revision for revision in revisions[limit:] if revision.state in ACCEPTED]
    return (*newest[: limit - len(in_use)], *in_use) if in_use else newest
