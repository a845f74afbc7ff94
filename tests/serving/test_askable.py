"""What can't be asked is counted before the first answer costs anything."""

import json
from types import SimpleNamespace

import pytest

from osprey_api.conditions import FailureReason
from osprey_api.rows import DropReason
from osprey_runtime.conversation import Conversation
from osprey_runtime.data import DropError, Ledger, ledger
from osprey_runtime.errors import StageError
from osprey_runtime.prompts import Prompt
from osprey_serving.client import ServerFacts
from osprey_serving.stages.regenerate import _askable

FACTS = ServerFacts(version="0.5.23", capacity=100, algorithm=None, speculation={}, plugin=None)


def render(conversation: Conversation, _defaults: dict) -> list[int]:
    """In place of a target's template: so many ids as its text says, and it refuses a word."""
    text = conversation.content
    if text.startswith("odd"):
        raise DropError(DropReason.TEMPLATE_REFUSED, "no such word")
    return [1] * int(text.split()[0])


def ask(texts: list[str], max_dropped: float = 0.05):
    prompts = [
        Prompt("talk", Conversation.of([{"role": "user", "content": text}]), f"x.jsonl line {number}")
        for number, text in enumerate(texts, start=1)
    ]
    accounts = {"talk": Ledger("pvc://data/x.jsonl", max_dropped)}
    return _askable(prompts, SimpleNamespace(render=render), FACTS, accounts), accounts["talk"]


def test_prompts_near_the_limit_of_the_server():
    # SGLang takes prompts up to 5 below its capacity, and cuts longer ones silently.
    lengths = range(92, 101)
    found, account = ask([f"{length} tokens" for length in lengths])
    assert [lengths[index] for index in found] == [92, 93, 94, 95]
    assert account.dropped == {DropReason.TOO_LONG: 5}
    assert account.examples[DropReason.TOO_LONG][0].startswith("x.jsonl line 5: 96 tokens leave no room")


def test_too_many_refusals_stop_before_the_first_request(tmp_path):
    texts = [f"1 {n}" for n in range(97)]
    found, account = ask([*texts, "odd 1", "odd 2", "odd 3"])
    assert len(found) == 97
    ledger.write(tmp_path, asked=[account])
    (written,) = json.loads((tmp_path / "rows.json").read_text())["asked"]
    assert (written["read"], written["kept"], written["dropped"]) == (100, 97, {"TemplateRefused": 3})
    with pytest.raises(StageError, match=r"3 of 13 rows cannot be used \(TemplateRefused 3\).*line 11") as caught:
        ask([*texts[:10], "odd 1", "odd 2", "odd 3"])
    assert caught.value.reason is FailureReason.INVALID_DATA


def test_a_domain_of_which_nothing_fits():
    with pytest.raises(StageError, match="TooLong 2"):
        ask(["99 a", "99 b"])
