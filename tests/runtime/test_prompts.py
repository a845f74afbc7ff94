"""No prompt is on both sides, and which side it is on depends on nothing but its text and the seed."""

import hashlib
import json
import random

import pytest

from osprey_api.conditions import FailureReason
from osprey_api.stages import HeldOut, Pinned, PromptSource
from osprey_runtime.errors import StageError
from osprey_runtime.prompts import Prompt, held_out_prompts, training_prompts


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("OSPREY_CLAIMS_ROOT", str(tmp_path))
    (tmp_path / "data").mkdir()

    def make(name: str, texts: list[str], *, samples=None, train=True, evaluate=True) -> PromptSource:
        lines = "\n".join(json.dumps({"prompt": text}) for text in texts)
        (tmp_path / "data" / f"{name}.jsonl").write_text(lines)
        pinned = Pinned(uri=f"pvc://data/{name}.jsonl")
        return PromptSource(
            name=name, source=pinned, prompt_field="prompt", samples=samples, train=train, evaluate=evaluate
        )

    return make


def by_rule(texts: list[str], seed: int) -> list[str]:
    """The contract's own words: smallest SHA-256(seed + newline + prompt) first."""
    return sorted(set(texts), key=lambda text: hashlib.sha256((str(seed) + "\n" + text).encode("utf-8")).hexdigest())


TEXTS = [f"What is {n} + {n}? ä\u2028" for n in range(100)]


def test_held_out_and_training_share_a_domain(source, local_location):
    sources, rule = [source("math", TEXTS)], HeldOut(samples=10, seed=3)
    expected = [Prompt("math", text) for text in by_rule(TEXTS, 3)]
    assert held_out_prompts(sources, rule, local_location) == expected[:10]
    assert training_prompts(sources, rule, local_location) == expected[10:]


def test_order_and_repetition_change_nothing(source, local_location):
    rule = HeldOut(samples=10, seed=0)
    mixed = TEXTS * 3
    random.Random(1).shuffle(mixed)
    one, other = [source("one", TEXTS)], [source("two", mixed)]
    for choose in (held_out_prompts, training_prompts):
        first, second = choose(one, rule, local_location), choose(other, rule, local_location)
        assert [prompt.text for prompt in first] == [prompt.text for prompt in second]


def test_seed_changes_the_choice(source, local_location):
    sources = [source("math", TEXTS)]
    chosen = [held_out_prompts(sources, HeldOut(samples=10, seed=seed), local_location) for seed in range(2)]
    assert chosen[0] != chosen[1]


def test_samples_bound_training_after_the_held_out_ones(source, local_location):
    found = training_prompts([source("math", TEXTS, samples=20)], HeldOut(samples=10, seed=0), local_location)
    assert [prompt.text for prompt in found] == by_rule(TEXTS, 0)[10:30]


def test_held_out_in_one_domain_trains_in_none(source, local_location):
    rule = HeldOut(samples=10, seed=0)
    sources = [source("chat", TEXTS, evaluate=False), source("exam", TEXTS[:50], train=False)]
    held_out = {prompt.text for prompt in held_out_prompts(sources, rule, local_location)}
    training = [prompt.text for prompt in training_prompts(sources, rule, local_location)]
    assert held_out == set(by_rule(TEXTS[:50], 0)[:10])
    assert training == [text for text in by_rule(TEXTS, 0) if text not in held_out]
    assert len(training) == 90


def test_prompt_of_two_domains_trains_once(source, local_location):
    sources = [source("a", TEXTS[:60], evaluate=False), source("b", TEXTS[40:], evaluate=False)]
    found = training_prompts(sources, HeldOut(samples=10, seed=0), local_location)
    assert [prompt.domain for prompt in found] == ["a"] * 60 + ["b"] * 40
    assert len({prompt.text for prompt in found}) == 100


def test_fewer_than_asked_are_all_held_out(source, local_location):
    sources, rule = [source("math", TEXTS[:5])], HeldOut(samples=10, seed=0)
    assert len(held_out_prompts(sources, rule, local_location)) == 5
    with pytest.raises(StageError, match=r"lower evaluation\.samples") as caught:
        training_prompts(sources, rule, local_location)
    assert caught.value.reason is FailureReason.INVALID_DATA


def test_blank_prompts_are_left_out_and_told(source, local_location, caplog):
    found = held_out_prompts([source("math", ["", " \n", "x"])], HeldOut(samples=10, seed=0), local_location)
    assert found == [Prompt("math", "x")]
    assert "2 blank prompts" in caplog.text


def test_row_without_the_field(source, local_location):
    sources = [source("math", TEXTS[:3]).model_copy(update={"prompt_field": "question"})]
    with pytest.raises(StageError, match=r"math\.jsonl line 1: there is no field 'question'"):
        held_out_prompts(sources, HeldOut(samples=1, seed=0), local_location)
