import pytest

from osprey_api.drafter import Gate, Revision
from osprey_api.rows import DropReason
from osprey_api.stages import ArtifactRef, Outcome, TokenizeResult
from osprey_api.status import StageStatus
from osprey_operator.plan.gate import judge, kept
from osprey_operator.plan.results import metrics_of, speedup
from tests.operator.world import digest, evaluation


def metrics(**changes):
    return metrics_of(Outcome(result=evaluation(**changes), seconds=3, peak_memory_bytes=5))


def revision(name="served", length=2.0, state="Serving"):
    return Revision(
        artifact=ArtifactRef(uri=f"s3://b/{name}", digest=digest(name)),
        evaluation="e",
        measured="so",
        acceptance_length=length,
        acceptance_length_corpus=length - 0.1,
        state=state,
    )


def test_the_largest_evaluation_fits_a_status_entry():
    result = evaluation()
    domain = result.by_domain[0]
    many = tuple(domain.model_copy(update={"name": f"d{index}"}) for index in range(8))
    result = result.model_copy(update={"by_domain": many, "acceptance_by_position": (0.5,) * 127})
    found = metrics_of(Outcome(result=result))
    assert len(found) == 64
    StageStatus(name="evaluate", state="Succeeded", metrics=found)


def test_a_domain_has_its_own_speedup():
    found = metrics(speedup=1.5)
    assert speedup(found) == 1.5
    assert speedup(found, "math") == 1.5
    assert speedup({**found, "baseline_tokens_per_second": 0.0}) == 0.0


@pytest.mark.parametrize(
    ("gate", "changes", "reason"),
    [
        ({}, {}, "Passed"),
        ({}, {"speedup": 0.99}, "TooSlow"),
        ({"min_speedup": 0}, {"speedup": 0.1}, "Passed"),
        ({"min_acceptance_length": 2.0}, {"length": 1.99}, "AcceptanceTooLow"),
        ({}, {"identical": 0.89}, "OutputsDiffer"),
        ({"min_identical_outputs": 0}, {"identical": 0.0}, "Passed"),
        ({}, {"length": 1.96}, "Passed"),
        ({}, {"length": 1.95}, "Regressed"),
        ({"max_regression": 1}, {"length": 1.0}, "Passed"),
    ],
)
def test_the_gate(gate, changes, reason):
    verdict = judge(metrics(**changes), Gate(**gate), revision(), "so")
    assert verdict.reason == reason
    assert verdict.passed == (reason == "Passed")


def test_figures_that_were_measured_otherwise_are_not_compared():
    verdict = judge(metrics(length=1.1), Gate(), revision(), "otherwise")
    assert verdict.passed
    assert "not held against the served revision's 2.000" in verdict.message


def test_without_another_revision_nothing_regresses():
    assert judge(metrics(length=1.1), Gate(), None, "so").passed


def test_the_served_revision_is_kept_whatever_its_age():
    newer = tuple(revision(str(index), state="Rejected") for index in range(5))
    served = revision()
    assert kept((*newer, served), 3) == (*newer[:2], served)
    assert kept(newer, 3) == newer[:3]


def test_dropped_rows_by_reason_are_figures():
    result = TokenizeResult(rows=7, tokens=70, rows_read=10, dropped={DropReason.NOT_JSON: 1, DropReason.BLANK_TEXT: 2})
    found = metrics_of(Outcome(result=result))
    assert (found["rows"], found["rows_read"]) == (7, 10)
    assert (found["dropped.NotJson"], found["dropped.BlankText"]) == (1, 2)
