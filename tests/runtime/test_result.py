"""Whatever a stage says fits into what Kubernetes keeps of it, and can be read there."""

import pytest

from osprey_api.conditions import EXIT_CODE_OF, FailureReason
from osprey_api.stages import (
    TERMINATION_MESSAGE_LIMIT,
    ArtifactRef,
    DomainAcceptance,
    EvaluateResult,
    ModelFacts,
    Outcome,
    Pinned,
    PinnedData,
    ResolveResult,
)
from osprey_runtime import result


def test_short_outcome_is_kept(tmp_path):
    outcome = Outcome(failure=FailureReason.INVALID_DATA, message="line 3: fix it", seconds=1.5)
    result.write(outcome, tmp_path / "log")
    assert Outcome.model_validate_json((tmp_path / "log").read_bytes()) == outcome


@pytest.mark.parametrize("character", ["x", "ä", "\U0001f600", "\n", "\x00", '"', "\\"])
@pytest.mark.parametrize("length", [1, 700, 1999, 2000, 2001, 100_000])
def test_long_message_loses_its_end(character, length):
    message = "begin" + character * length
    data = result.encode(Outcome(failure=FailureReason.INTERNAL_ERROR, message=message))
    assert len(data) <= TERMINATION_MESSAGE_LIMIT
    found = Outcome.model_validate_json(data).message
    assert len(found) <= 2048
    assert found == message or (found.endswith("…") and message.startswith(found[:-1]))
    if length <= 700 and len(character.encode()) <= 2 and character != "\x00":
        assert found == message
    assert len(data) > 1300 or found == message  # not cut by more than there is need for


def test_largest_evaluation_fits():
    number = 1.2345678901234567
    domain = DomainAcceptance(
        name="d" * 63,
        requests=10**6,
        acceptance_length=number,
        acceptance_length_corpus=number,
        tokens_per_second=number,
        baseline_tokens_per_second=number,
    )
    answer = EvaluateResult(
        requests=10**6,
        acceptance_length=number,
        acceptance_length_corpus=number,
        acceptance_by_position=(number,) * 16,
        by_domain=(domain,) * 8,
        tokens_per_second=number,
        baseline_tokens_per_second=number,
        identical_outputs=number,
    )
    artifact = ArtifactRef(uri="s3://bucket/" + "p" * 500, digest="sha256:" + "0" * 64)
    outcome = Outcome(artifact=artifact, result=answer, seconds=number, peak_memory_bytes=10**12)
    assert Outcome.model_validate_json(result.encode(outcome)) == outcome


def test_answer_that_cannot_fit_is_a_failure_that_says_so():
    data = tuple(
        PinnedData(name=f"d{n}", source=Pinned(uri=f"s3://bucket/{'x' * 1000}", digest="sha256:" + "0" * 64))
        for n in range(8)
    )
    facts = ModelFacts(architecture="A", layers=1, hidden_size=1, vocab_size=1, size_bytes=1)
    answer = ResolveResult(model=Pinned(uri="pvc://m/m"), facts=facts, data=data)
    found = Outcome.model_validate_json(result.encode(Outcome(result=answer)))
    assert found.failure is FailureReason.INVALID_CONFIG
    assert "shorten the URIs" in found.message


def test_nowhere_to_write_is_a_warning(tmp_path, caplog):
    result.write(Outcome(message="x"), tmp_path / "no-folder" / "log")
    assert "can't be written" in caplog.text


def test_every_reason_of_a_stage_has_an_exit_code():
    seen_by_the_operator = {
        FailureReason.DEADLINE_EXCEEDED,
        FailureReason.IMAGE_PULL,
        FailureReason.UNSCHEDULABLE,
        FailureReason.SECRET_NOT_FOUND,
        FailureReason.CLAIM_NOT_FOUND,
        FailureReason.NAME_TAKEN,
        FailureReason.POD_REFUSED,
    }
    assert set(EXIT_CODE_OF) == set(FailureReason) - seen_by_the_operator
