"""No prompt is on both sides, and which side it is on depends on nothing but its text and the seed."""

import hashlib
import json
import random

import pytest

from osprey_api.conditions import FailureReason
from osprey_api.rows import DropReason
from osprey_api.stages import HeldOut, Pinned, PromptSource
from osprey_runtime.conversation import Conversation
from osprey_runtime.data import Ledger
from osprey_runtime.errors import StageError
from osprey_runtime.prompts import Prompt, conversations, held_out_prompts, training_prompts


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("OSPREY_CLAIMS_ROOT", str(tmp_path))
    (tmp_path / "data").mkdir()

    def make(name: str, texts: list, *, samples=None, train=True, evaluate=True) -> PromptSource:
        lines = "\n".join(json.dumps(row if isinstance(row, dict) else {"prompt": row}) for row in texts)
        (tmp_path / "data" / f"{name}.jsonl").write_text(lines)
        pinned = Pinned(uri=f"pvc://data/{name}.jsonl")
        return PromptSource(
            name=name, source=pinned, prompt_field=None, samples=samples, train=train, evaluate=evaluate
        )

    return make


def asked(text: str) -> Conversation:
    return Conversation.of([{"role": "user", "content": text}])


def texts_of(prompts: list[Prompt]) -> list[str]:
    return [prompt.conversation.content for prompt in prompts]


def by_rule(texts: list[str], seed: int) -> list[str]:
    """The contract's own words: smallest SHA-256(seed + newline + prompt) first."""
    return sorted(set(texts), key=lambda text: hashlib.sha256((str(seed) + "\n" + text).encode("utf-8")).hexdigest())


TEXTS = [f"What is {n} + {n}? ä\u2028" for n in range(100)]


def test_held_out_and_training_share_a_domain(source, local_location):
    sources, rule = [source("math", TEXTS)], HeldOut(samples=10, seed=3)
    expected = [Prompt("math", asked(text)) for text in by_rule(TEXTS, 3)]
    assert held_out_prompts(sources, rule, local_location).prompts == expected[:10]
    assert training_prompts(sources, rule, local_location).prompts == expected[10:]


def test_order_and_repetition_change_nothing(source, local_location):
    rule = HeldOut(samples=10, seed=0)
    mixed = TEXTS * 3
    random.Random(1).shuffle(mixed)
    one, other = [source("one", TEXTS)], [source("two", mixed)]
    for choose in (held_out_prompts, training_prompts):
        first, second = choose(one, rule, local_location), choose(other, rule, local_location)
        assert texts_of(first.prompts) == texts_of(second.prompts)


def test_seed_changes_the_choice(source, local_location):
    sources = [source("math", TEXTS)]
    chosen = [held_out_prompts(sources, HeldOut(samples=10, seed=seed), local_location).prompts for seed in range(2)]
    assert chosen[0] != chosen[1]


def test_samples_bound_training_after_the_held_out_ones(source, local_location):
    found = training_prompts([source("math", TEXTS, samples=20)], HeldOut(samples=10, seed=0), local_location)
    assert texts_of(found.prompts) == by_rule(TEXTS, 0)[10:30]


def test_held_out_in_one_domain_trains_in_none(source, local_location):
    rule = HeldOut(samples=10, seed=0)
    sources = [source("chat", TEXTS, evaluate=False), source("exam", TEXTS[:50], train=False)]
    held_out = set(texts_of(held_out_prompts(sources, rule, local_location).prompts))
    training = texts_of(training_prompts(sources, rule, local_location).prompts)
    assert held_out == set(by_rule(TEXTS[:50], 0)[:10])
    assert training == [text for text in by_rule(TEXTS, 0) if text not in held_out]
    assert len(training) == 90


def test_prompt_of_two_domains_trains_once(source, local_location):
    sources = [source("a", TEXTS[:60], evaluate=False), source("b", TEXTS[40:], evaluate=False)]
    found = training_prompts(sources, HeldOut(samples=10, seed=0), local_location)
    assert [prompt.domain for prompt in found.prompts] == ["a"] * 60 + ["b"] * 40
    assert len(set(texts_of(found.prompts))) == 100


def test_fewer_than_asked_are_all_held_out(source, local_location):
    sources, rule = [source("math", TEXTS[:5])], HeldOut(samples=10, seed=0)
    assert len(held_out_prompts(sources, rule, local_location).prompts) == 5
    with pytest.raises(StageError, match=r"lower evaluation\.samples") as caught:
        training_prompts(sources, rule, local_location)
    assert caught.value.reason is FailureReason.INVALID_DATA


def test_odd_rows_are_counted_and_name_their_lines(source, local_location):
    sources = [source("math", ["", *TEXTS, {"messages": []}, {"prompt": 7}])]
    chosen = training_prompts(sources, HeldOut(samples=10, seed=0), local_location)
    ledger = chosen.ledgers["math"]
    assert (ledger.read, ledger.kept, len(chosen.prompts)) == (103, 100, 90)
    assert ledger.dropped == {
        DropReason.BLANK_TURN: 1,
        DropReason.EMPTY_CONVERSATION: 1,
        DropReason.WRONG_TYPE: 1,
    }
    assert ledger.examples[DropReason.BLANK_TURN][0].startswith("pvc://data/math.jsonl line 1: ")
    lines = {prompt.conversation.content: prompt.place for prompt in chosen.prompts}
    assert all(lines[text] == f"pvc://data/math.jsonl line {TEXTS.index(text) + 2}" for text in lines)


def test_a_row_without_the_field_that_was_named(source, local_location):
    sources = [source("math", TEXTS[:3]).model_copy(update={"prompt_field": "question"})]
    with pytest.raises(StageError, match=r"math\.jsonl line 1: there is no field 'question'"):
        held_out_prompts(sources, HeldOut(samples=1, seed=0), local_location)


def test_the_same_prompt_in_other_words_of_the_format_is_on_one_side(source, local_location):
    shapes = [
        lambda text: text,
        lambda text: {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "A"}]},
        lambda text: {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]},
        lambda text: {"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": "B"}]},
        lambda text: {"instruction": text, "input": "", "output": "C"},
    ]
    rule = HeldOut(samples=10, seed=0)
    exam = source("exam", [shapes[n % 5](text) for n, text in enumerate(TEXTS)], train=False)
    chat = source("chat", [shapes[(n + 1) % 5](text) for n, text in enumerate(TEXTS)], evaluate=False)
    held_out = texts_of(held_out_prompts([exam, chat], rule, local_location).prompts)
    training = texts_of(training_prompts([exam, chat], rule, local_location).prompts)
    assert held_out == by_rule(TEXTS, 0)[:10]
    assert training == by_rule(TEXTS, 0)[10:]


def test_a_question_with_other_options_of_the_template_is_on_the_same_side(source, local_location):
    rule = HeldOut(samples=10, seed=0)
    rows = [
        {"prompt": text, "chat_template_kwargs": {"enable_thinking": thinking}}
        for text in TEXTS
        for thinking in (True, False)
    ]
    held_out = held_out_prompts([source("math", rows)], rule, local_location).prompts
    trained = training_prompts([source("math", rows)], rule, local_location).prompts
    assert len(held_out) == 10
    assert not set(texts_of(held_out)) & set(texts_of(trained))
    assert len(trained) == 2 * (len(TEXTS) - 5)  # both ways of each question


def test_a_conversation_counts_as_a_whole(source, local_location):
    def talk(*contents, system="Be brief."):
        roles = ["system", *["user", "assistant"] * len(contents)]
        return {"messages": [{"role": r, "content": c} for r, c in zip(roles, [system, *contents], strict=False)]}

    rows = [talk("hi"), talk("hi", "hello", "bye"), talk("hi", "hello"), talk("hi", system="Be long."), "hi"]
    prompts = held_out_prompts([source("talk", rows)], HeldOut(samples=9, seed=0), local_location).prompts
    assert len(prompts) == 4  # the third is the first: its answer is the target's to give
    assert {len(prompt.conversation.messages) for prompt in prompts} == {1, 2, 4}


# ------------------------------------------------------------------------------------- files as they are found


@pytest.fixture
def file_of(tmp_path, monkeypatch, local_location):
    """Writes a file and returns its prompts by place, and the account of its rows: nothing is set but its URI."""
    monkeypatch.setenv("OSPREY_CLAIMS_ROOT", str(tmp_path))
    (tmp_path / "data").mkdir()

    def read(name: str, content: str):
        (tmp_path / "data" / name).write_text(content)
        uri = f"pvc://data/{name}"
        ledger = Ledger(uri)
        return dict(conversations(Pinned(uri=uri), None, local_location, ledger)), ledger

    return read


def test_a_list_of_instructions_keeps_their_inputs_and_names_what_has_no_answer(file_of):
    """As data/code_alpaca_2k.json of sahil280114/codealpaca, in counts and shape.

    The file itself (SHA-256 9cb73526…) was tried as it is: 2,015 of its 2,017 rows are prompts, each the instruction,
    and in 1,004 of them the input below it; items 238 and 1860 are named, whose outputs are blank.
    """
    blank = {238: "", 1860: " \n"}
    written = [
        {
            "instruction": f"Write function {number}",
            "input": f"f({number}) =\n\t{number}" if number % 2 == 0 and number <= 2012 else "",
            "output": blank.get(number, f"def f(): return {number}"),
        }
        for number in range(1, 2018)
    ]
    assert sum(bool(row["input"]) for row in written) == 1006
    found, ledger = file_of("code.json", json.dumps(written, indent=4))
    assert (ledger.read, ledger.kept, ledger.dropped) == (2017, 2015, {DropReason.BLANK_TURN: 2})
    why = "field 'output' is blank: nobody could answer this instruction"
    assert ledger.examples[DropReason.BLANK_TURN] == [f"pvc://data/code.json item {n}: {why}" for n in blank]
    assert {place: prompt.messages for place, prompt in found.items()} == {
        f"pvc://data/code.json item {number}": [
            {"role": "user", "content": "\n\n".join(part for part in (row["instruction"], row["input"]) if part)}
        ]
        for number, row in enumerate(written, start=1)
        if number not in blank
    }


def test_dialogues_keep_system_messages_tools_and_what_they_said(file_of):
    """As ShareGPT and its relatives write them; an unknown role costs the dialogue, not the turn alone."""

    def row(*turns, **more):
        return {"id": "x", "conversations": [{"from": said, "value": text} for said, text in turns], **more}

    call = {"name": "weather", "arguments": {"at": "Rome"}}
    tool = {"name": "weather", "parameters": {"type": "object"}}
    written = [
        row(("system", "Be brief."), ("human", "Hi"), ("gpt", "Ho")),
        row(("human", "Rome?"), ("function_call", json.dumps(call)), ("observation", "sunny"), ("gpt", "Sunny."),
            system="Be kind.", tools=json.dumps([tool])),
        row(("human", "Hi"), ("tool", "42"), ("gpt", "Ho"), ("human", "Why?")),
        row(("human", "Hi"), ("critic", "bad"), ("gpt", "Ho"), ("human", "Why?")),
    ]  # fmt: skip
    lines = [json.dumps(each) + "\n" for each in written]
    found, ledger = file_of("dialogues.jsonl", "".join(lines + lines[:1] * 16))
    assert (ledger.read, ledger.kept, ledger.dropped) == (20, 19, {DropReason.UNKNOWN_ROLE: 1})
    assert ledger.examples[DropReason.UNKNOWN_ROLE][0].startswith("pvc://data/dialogues.jsonl line 4: turn 2 ")
    prompts = list(found.values())
    called = {"type": "function", "function": call}
    assert [prompt.messages for prompt in prompts[:3]] == [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "Rome?"},
            {"role": "assistant", "content": "", "tool_calls": [called]},
            {"role": "tool", "content": "sunny"},
        ],
        [
            {"role": "user", "content": "Hi"},
            {"role": "tool", "content": "42"},
            {"role": "assistant", "content": "Ho"},
            {"role": "user", "content": "Why?"},
        ],
    ]
    assert [prompt.tools for prompt in prompts[:3]] == [None, [{"type": "function", "function": tool}], None]
