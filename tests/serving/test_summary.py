"""The figures of an evaluation, and what baseline and evaluate must agree on, from rows made by hand."""

import pytest

from osprey_api.conditions import FailureReason
from osprey_api.stages import Engine, Speculation
from osprey_runtime.errors import StageError
from osprey_serving.client import Request, ServerFacts
from osprey_serving.measure import Asked, Judged, by_domain, check_version, read_rows, tokens_per_second, write_rows
from osprey_serving.stages.evaluate import check_same_prompts, check_speculation, summary

PROMPT = (5, 6, 7)


def asked(domain, tokens, started, latency, prompt=PROMPT):
    return Asked(
        domain=domain,
        prompt_ids=prompt,
        max_tokens=8,
        output_ids=tuple(range(tokens)),
        finish="length",
        completion_tokens=tokens,
        started_seconds=started,
        latency_seconds=latency,
    )


def judged(domain, tokens, steps, histogram, *, divergence=None, started=0.0, latency=1.0):
    row = asked(domain, tokens, started, latency)
    return Judged(**row.model_dump(), verify_steps=steps, accepted_histogram=histogram, first_divergence=divergence)


def test_the_figures_of_an_evaluation():
    rows = [
        judged("math", 8, 4, (1, 2, 1), latency=2),
        judged("math", 1, 0, (), started=1, latency=3),
        judged("code", 6, 2, (0, 0, 2), divergence=3, latency=1),
    ]
    baseline = [asked("math", 8, 0, 4), asked("math", 1, 4, 1), asked("code", 5, 0, 5)]
    result = summary(rows, baseline, steps=2)
    assert (result.requests, result.requests_without_verify_step) == (3, 1)
    assert result.acceptance_length == pytest.approx((8 / 4 + 6 / 2) / 2)
    assert result.acceptance_length_corpus == pytest.approx(15 / 6)
    assert result.acceptance_by_position == pytest.approx((5 / 6, 3 / 6))
    assert result.identical_outputs == pytest.approx(2 / 3)
    assert result.tokens_per_second == pytest.approx(15 / (4 + 1))
    assert result.baseline_tokens_per_second == pytest.approx(14 / (5 + 5))
    math, code = result.by_domain
    assert (math.name, math.requests, math.acceptance_length) == ("math", 2, 2.0)
    assert (math.tokens_per_second, math.baseline_tokens_per_second) == (9 / 4, 9 / 5)
    assert (code.name, code.acceptance_length_corpus, code.tokens_per_second) == ("code", 3.0, 6.0)


def test_requests_at_a_time_share_their_domains_time():
    rows = [asked("a", 10, 0, 2), asked("a", 10, 0.5, 3.5), asked("b", 5, 0, 1)]
    assert tokens_per_second(by_domain(rows).values()) == pytest.approx(25 / (4 + 1))


def test_a_domain_in_which_no_draft_was_judged_is_an_error_and_no_number():
    rows = [judged("math", 8, 4, (1, 2, 1)), judged("short", 1, 0, ())]
    with pytest.raises(StageError, match=r"domain short ended with its first token.*evaluation\.maxTokens") as caught:
        summary(rows, [asked("math", 8, 0, 1), asked("short", 1, 0, 1)], steps=2)
    assert caught.value.reason is FailureReason.INVALID_DATA


def test_rows_are_read_as_they_were_written(tmp_path):
    rows = [judged("math", 8, 4, (1, 2, 1)), judged("code", 6, 2, (0, 0, 2), divergence=3)]
    write_rows(tmp_path, rows)
    assert read_rows(tmp_path, Judged) == rows
    assert len((tmp_path / "requests.jsonl").read_bytes().splitlines()) == 2


@pytest.mark.parametrize(
    "requests",
    [
        {"math": [Request((5, 6, 8), 8)]},
        {"math": [Request(PROMPT, 8), Request(PROMPT, 8)]},
        {"code": [Request(PROMPT, 8)]},
        {},
    ],
)
def test_a_baseline_of_other_prompts_is_refused(requests):
    with pytest.raises(StageError, match="the baseline was asked") as caught:
        check_same_prompts(requests, [asked("math", 8, 0, 1)])
    assert caught.value.reason is FailureReason.INVALID_CONFIG


def test_the_baselines_own_prompts_are_accepted():
    check_same_prompts({"math": [Request(PROMPT, 8)]}, [asked("math", 8, 0, 1)])


def facts(**change):
    right = {
        "version": "0",
        "capacity": 100,
        "algorithm": "EAGLE3",
        "speculation": {"steps": 5, "top_k": 1, "draft_tokens": 6},
        "plugin": None,
    }
    return ServerFacts(**(right | change))


@pytest.mark.parametrize(
    ("server", "reason", "words"),
    [
        (facts(algorithm=None, speculation={}), FailureReason.INVALID_CONFIG, "drafts by nothing"),
        (facts(algorithm="EAGLE"), FailureReason.INVALID_CONFIG, "drafts by EAGLE, and .* under EAGLE3"),
        (
            facts(speculation={"steps": 3, "top_k": 1, "draft_tokens": 4}),
            FailureReason.INVALID_CONFIG,
            "'steps': 3.*'steps': 5",
        ),
        (facts(), FailureReason.SERVER_FAILED, "plugin in version none"),
        (facts(plugin="0.0.1"), FailureReason.SERVER_FAILED, r"plugin in version 0\.0\.1"),
    ],
)
def test_a_server_that_drafts_otherwise_is_not_measured(server, reason, words):
    with pytest.raises(StageError, match=words) as caught:
        check_speculation(server, Speculation())
    assert caught.value.reason is reason


@pytest.mark.parametrize(
    ("wanted", "found", "same"),
    [
        ("0.5.23", "0.5.23", True),
        ("0.5.23-cu130", "0.5.23", True),
        ("0.5.23.post1", "0.5.23.post1+cpu", True),
        ("0.5.23", "0.5.24", False),
        ("0.5.23", "0.5.23.post1", False),
        ("0.5.23.post1-cu130", "0.5.23", False),
        ("latest", "0.5.23", True),  # says nothing
        ("registry/sglang:v0.5.22", "0.5.23", True),
        ("sha256:0.5.22", "0.5.23", True),
    ],
)
def test_a_server_of_another_version_is_not_measured(wanted, found, same):
    if same:
        check_version(facts(version=found), Engine(version=wanted))
        return
    with pytest.raises(StageError, match=r"images\.sglang\.version") as caught:
        check_version(facts(version=found), Engine(version=wanted))
    assert caught.value.reason is FailureReason.INVALID_CONFIG
    assert found in caught.value.message
    assert wanted.partition("-")[0] in caught.value.message


@pytest.mark.parametrize(("prompt", "room"), [(10, 90), (95, 5), (96, 0), (100, 0), (200, 0)])
def test_the_room_behind_a_prompt(prompt, room):
    assert facts().room([0] * prompt) == room
