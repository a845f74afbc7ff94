"""regenerate, baseline and evaluate as containers of a pod beside a real SGLang server."""

import json
import re
import signal
import threading
import time

import httpx
import pytest
import torch

from osprey_api.conditions import FailureReason
from osprey_api.stages import InputRole

pytestmark = pytest.mark.timeout(600)


def lines(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def scraped(url, name):
    """The sum of a metric's series."""
    text = httpx.get(f"{url}/metrics", timeout=10, follow_redirects=True).text
    found = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, found))


def when_step(port, step, act):
    """Act in the background as soon as the stage's own metrics tell that it has done so much."""

    def wait():
        while True:
            try:
                if scraped(f"http://127.0.0.1:{port}", "osprey_stage_step") >= step:
                    break
            except httpx.TransportError:  # not up yet
                pass
            time.sleep(0.02)
        act()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def test_the_drafter_is_measured_on_the_baselines_prompts(pod, configs, plain, drafting):
    baseline = pod.run(configs.baseline(), plain.url)
    assert baseline.failure is None, baseline.message
    reference = lines(pod.files(baseline) / "requests.jsonl")
    assert [row["domain"] for row in reference] == ["math"] * 6 + ["code"] * 6
    assert baseline.result.requests == 12

    outcome = pod.run(configs.evaluate(), drafting.url, inputs={InputRole.BASELINE: baseline.artifact})
    assert outcome.failure is None, outcome.message
    rows, result = lines(pod.files(outcome) / "requests.jsonl"), outcome.result
    assert json.loads((pod.files(outcome) / "report.json").read_bytes()) == result.model_dump(mode="json")

    # Speculation is lossless.
    assert [row["output_ids"] for row in rows] == [row["output_ids"] for row in reference]
    assert result.identical_outputs == 1
    assert all(row["first_divergence"] is None for row in rows)
    # The figures, counted again from what was written.
    judged = [row for row in rows if row["verify_steps"]]
    assert result.requests_without_verify_step == len(rows) - len(judged)
    lengths = [row["completion_tokens"] / row["verify_steps"] for row in judged]
    assert result.acceptance_length == pytest.approx(sum(lengths) / len(lengths))
    tokens, steps = (sum(row[name] for row in rows) for name in ("completion_tokens", "verify_steps"))
    assert result.acceptance_length_corpus == pytest.approx(tokens / steps)
    assert 1.1 < result.acceptance_length < 6  # the tiny drafter is right now and then
    assert len(result.acceptance_by_position) == 5
    first = sum(sum(row["accepted_histogram"][1:]) for row in rows) / steps
    assert result.acceptance_by_position[0] == pytest.approx(first)
    assert list(result.acceptance_by_position) == sorted(result.acceptance_by_position, reverse=True)
    for row in judged:
        assert sum(row["accepted_histogram"]) == row["verify_steps"]
        assert len(row["output_ids"]) == row["completion_tokens"]
    # By domain, each on its own clock.
    assert [domain.name for domain in result.by_domain] == ["math", "code"]
    math = [row for row in rows if row["domain"] == "math"]
    wall = max(row["started_seconds"] + row["latency_seconds"] for row in math)
    assert result.by_domain[0].tokens_per_second == pytest.approx(sum(r["completion_tokens"] for r in math) / wall)
    assert result.baseline_tokens_per_second == pytest.approx(baseline.result.tokens_per_second)

    # Asked other prompts, the drafter is not compared.
    other = configs.evaluate(held_out=configs.evaluate().held_out.model_copy(update={"seed": 2}))
    refused = pod.run(other, drafting.url, inputs={InputRole.BASELINE: baseline.artifact})
    assert refused.failure is FailureReason.INVALID_CONFIG
    assert "prompts of math" in refused.message
    # Nor is a server judged that does not draft, or drafts otherwise.
    silent = pod.run(configs.evaluate(max_tokens=31), plain.url, inputs={InputRole.BASELINE: baseline.artifact})
    assert (silent.failure, "drafts by nothing" in silent.message) == (FailureReason.INVALID_CONFIG, True)
    drafts = pod.run(configs.baseline(max_tokens=31), drafting.url)
    assert (drafts.failure, "serverArgs" in drafts.message) == (FailureReason.INVALID_CONFIG, True)


def test_answers_are_those_of_the_target_in_the_order_of_the_prompts(pod, configs, plain, world):
    outcome = pod.run(configs.regenerate(), plain.url, execution={"concurrency": 5})
    assert outcome.failure is None, outcome.message
    answers = lines(pod.files(outcome) / "answers-00000.jsonl")
    assert [row["domain"] for row in answers] == ["math"] * 18 + ["talk"] * 2
    result = outcome.result
    assert (result.prompts, result.skipped) == (20, 1)  # the one that is longer than the context
    assert result.answer_tokens == sum(len(row["answer_ids"]) for row in answers)
    assert result.cut_at_limit == sum(row["finish"] == "length" for row in answers)
    for row in answers:
        assert row["prompt_ids"][0] == 0
        assert row["prompt_ids"].count(0) == 1  # one BOS: the template's
        assert len(row["answer_ids"]) == 32 if row["finish"] == "length" else row["answer_ids"][-1] == 1
    # Greedy, by transformers.
    for row in answers[::9]:
        ids = list(row["prompt_ids"])
        for _ in row["answer_ids"]:
            with torch.no_grad():
                ids.append(int(world.model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert ids[len(row["prompt_ids"]) :] == row["answer_ids"]


def test_held_out_prompts_are_not_answered_for_training(pod, configs, plain):
    regenerated = pod.run(configs.regenerate(), plain.url)
    baseline = pod.run(configs.baseline(), plain.url)
    train = {tuple(row["prompt_ids"]) for row in lines(pod.files(regenerated) / "answers-00000.jsonl")}
    held_out = {tuple(row["prompt_ids"]) for row in lines(pod.files(baseline) / "requests.jsonl")}
    assert len(train) == 20
    assert len(held_out) == 12
    assert not train & held_out


def test_a_wrong_admin_key_is_said_to_be_wrong(pod, configs, plain):
    outcome = pod.run(configs.baseline(max_tokens=8), plain.url, OSPREY_ADMIN_KEY="another")
    assert outcome.failure is FailureReason.INVALID_CONFIG
    assert "OSPREY_ADMIN_KEY" in outcome.message


def test_a_server_that_never_comes_is_a_timeout_that_says_where_to_look(pod, configs):
    outcome = pod.run(configs.baseline(max_tokens=8), "http://127.0.0.1:9", "--start-deadline", "1")
    assert outcome.failure is FailureReason.SERVER_TIMEOUT
    assert "container `server`" in outcome.message


def test_a_stopped_stage_goes_on_where_it_was(pod, configs, plain, free_port):
    config, execution = configs.regenerate(max_tokens=40), {"concurrency": 2, "checkpoint_every_steps": 3}
    whole = lines(pod.files(pod.run(configs.regenerate(), plain.url)) / "answers-00000.jsonl")
    with pod.start(config, plain.url, execution=execution, OSPREY_METRICS_PORT=str(free_port)) as process:
        when_step(free_port, 7, lambda: process.send_signal(signal.SIGTERM)).join()
    assert process.returncode == 143
    asked_before = scraped(plain.url, "sglang:num_requests_total")
    outcome = pod.run(config, plain.url, execution=execution)
    assert outcome.failure is None, outcome.message
    asked = scraped(plain.url, "sglang:num_requests_total") - asked_before
    steps = len(whole) + 1  # with the prompt that is skipped
    assert asked <= steps - 7  # what was finished when the signal came was not asked again
    answers = lines(pod.files(outcome) / "answers-00000.jsonl")
    assert [row["prompt_ids"] for row in answers] == [row["prompt_ids"] for row in whole]
    assert [row["answer_ids"][:32] for row in answers] == [row["answer_ids"] for row in whole]


def test_a_domain_during_which_the_server_died_is_measured_again(pod, configs, plain, free_port):
    away = []

    def die():
        began = time.monotonic()
        plain.kill()
        plain.start()
        away.append(time.monotonic() - began)

    killer = when_step(free_port, 2, die)
    config = configs.baseline(max_tokens=60, concurrency=1)
    outcome = pod.run(config, plain.url, OSPREY_METRICS_PORT=str(free_port))
    killer.join()
    assert outcome.failure is None, outcome.message
    rows = lines(pod.files(outcome) / "requests.jsonl")
    assert [row["domain"] for row in rows] == ["math"] * 6 + ["code"] * 6
    assert max(row["started_seconds"] + row["latency_seconds"] for row in rows) < away[0]  # the time is that without it


def test_a_server_that_dies_for_good_fails_the_stage_and_keeps_the_answers(pod, configs, plain, free_port, world):
    attempt = "dying"
    killer = when_step(free_port, 6, plain.kill)
    outcome = pod.run(
        configs.regenerate(max_tokens=64),
        plain.url,
        "--restart-deadline",
        "2",
        execution={"concurrency": 2, "checkpoint_every_steps": 1000},
        OSPREY_METRICS_PORT=str(free_port),
        OSPREY_ATTEMPT=attempt,
    )
    killer.join()
    assert outcome.failure is FailureReason.SERVER_FAILED
    assert "container `server`" in outcome.message
    (complete,) = world.root.glob(f"storage/team/regenerate/*/checkpoints/step-*-{attempt}/complete.json")
    assert json.loads(complete.read_bytes())["step"] >= 6
