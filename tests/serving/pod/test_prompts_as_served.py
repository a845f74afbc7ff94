"""A target whose tokenizer begins each text by itself, and whose template prints the begin token and the date."""

import datetime as dt
import json
import shutil
from types import SimpleNamespace

import httpx
import pytest
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils

from osprey_api.rows import DropReason
from osprey_api.stages import Engine, HeldOut, Pinned, PromptSource
from osprey_serving.chat import PINNED_DATE
from osprey_trainer.data.answers import fit, read_dialogues

pytestmark = pytest.mark.timeout(600)

BEGIN = 0
TEMPLATE = (
    "{% if messages[0].role == 'system' %}{% set system, turns = messages[0].content, messages[1:] %}"
    "{% else %}{% set system, turns = 'Today is ' + strftime_now('%d %B %Y') + '.', messages %}{% endif %}"
    "{{ bos_token }}({{ system }})"
    "{% for m in turns %}{% if m.role in ['user', 'assistant'] %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{% if call.id | length < 9 %}{{ raise_exception('a short id') }}{% endif %}"
    "{% endfor %}{% endif %}[{{ m.content }}]{% endfor %}"
)
"""As that of Mistral Small 3.1: a default system message with the date, and no patience with roles and ids of calls."""
USER = {"role": "user", "content": "why"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
ROWS = [
    {"prompt": "why"},
    {"messages": [USER, {"role": "assistant", "content": "so"}, {"role": "user", "content": "no"}]},
    {"messages": [{"role": "system", "content": "Be brief."}, USER]},
]
REFUSED = [
    {"messages": [USER, USER]},
    {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "user", "content": "no"}]},
]


@pytest.fixture(scope="module")
def target(world):
    """The folder of the target."""
    folder = world.claims / "models" / "beginner"
    shutil.copytree(world.target, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BEGIN)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    for name, rows in (("asked", ROWS), ("odd", ROWS + REFUSED)):
        (world.claims / "data" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def server(target, sglang_server):
    """SGLang, which serves it: its address, and the target's tokenizer."""
    with sglang_server(target) as server:
        yield SimpleNamespace(url=server.url, tokenizer=AutoTokenizer.from_pretrained(target))


@pytest.fixture
def source():
    """Makes the source of a file."""

    def make(name: str, **changes) -> PromptSource:
        pinned = Pinned(uri=f"pvc://data/{name}.jsonl")
        fields = {"prompt_field": None, "samples": None, "train": True, "evaluate": True, **changes}
        return PromptSource(name=name, source=pinned, **fields)

    return make


def post(server, path, body):
    answer = httpx.post(server.url + path, json=body, timeout=60)
    answer.raise_for_status()
    return answer.json()


def served(server, row) -> list[int]:
    """The ids that the server's chat endpoint makes of a row, and gives its model."""
    messages = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
    request = {"model": "x", "messages": messages, "max_tokens": 1, "return_prompt_token_ids": True}
    answer = post(server, "/v1/chat/completions", request)
    (choice,) = answer["choices"]
    assert len(choice["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
    return choice["prompt_token_ids"]


def trained_on(pod, outcome) -> list[list[int]]:
    dialogues, _ = fit(read_dialogues(pod.files(outcome), vocab_size=512), sequence_length=512)
    return [dialogue.prompt_ids.tolist() for dialogue in dialogues]


def test_a_prompt_begins_once_wherever_it_is_used(pod, configs, server, source):
    tokenizer = server.tokenizer
    rendered = tokenizer.decode(served(server, ROWS[0]))
    # This tokenizer would begin it once more: text that is sent as such does.
    assert tokenizer(rendered)["input_ids"][:2] == [BEGIN, BEGIN]
    sent = post(server, "/generate", {"text": rendered, "sampling_params": {"max_new_tokens": 1}})
    assert sent["meta_info"]["prompt_tokens"] == len(served(server, ROWS[0])) + 1

    common = {"target": Pinned(uri="pvc://models/beginner"), "prompts": (source("asked"),)}
    regenerated = pod.run(configs.regenerate(**common, held_out=HeldOut(samples=0, seed=0)), server.url)
    baseline = pod.run(configs.baseline(**common, held_out=HeldOut(samples=3, seed=0)), server.url)
    assert (regenerated.failure, baseline.failure) == (None, None)
    trained = trained_on(pod, regenerated)
    requests = (pod.files(baseline) / "requests.jsonl").read_text().splitlines()
    evaluated = [json.loads(line)["prompt_ids"] for line in requests]
    asked = [served(server, row) for row in ROWS]
    assert sorted(trained) == sorted(evaluated)
    for ids in trained + evaluated + asked:
        assert (ids[0], ids.count(BEGIN)) == (BEGIN, 1)

    # All else is as served too, but for the date, which is the server's own.
    def dated(found, days):
        texts = {tokenizer.decode(ids) for ids in found}
        for day in days:
            texts = {text.replace(f"{day:%d %B %Y}", "DATE") for text in texts}
        return texts

    today = dt.date.today()  # noqa: DTZ011 - the server's, too
    ours = dated(trained, [PINNED_DATE])
    assert dated(asked, [today, today - dt.timedelta(days=1)]) == ours  # it may just have been midnight
    assert dated(asked, []) != dated(trained, [])
    assert sum("(Today is DATE.)" in text for text in ours) == 2


@pytest.fixture
def on_the_day(monkeypatch):
    """Sets the day on which templates are rendered in this process."""

    def set_day(day: dt.date) -> None:
        class Clock(dt.datetime):
            @classmethod
            def now(cls, tz=None):
                return cls(day.year, day.month, day.day, tzinfo=tz)

        monkeypatch.setattr(chat_template_utils, "datetime", Clock)

    return set_day


def test_data_prepared_on_two_days_are_the_same_bytes(pod, configs, server, source, on_the_day):
    printed, made = [], []
    for number, day in enumerate((dt.date(2031, 5, 6), dt.date(2032, 7, 8))):
        on_the_day(day)
        printed.append(server.tokenizer.apply_chat_template([USER], tokenize=False))
        config = configs.regenerate(
            target=Pinned(uri="pvc://models/beginner"),
            prompts=(source("odd", max_dropped=0.5),),
            held_out=HeldOut(samples=0, seed=0),
            engine=Engine(
                version="0.5.23", server_args=("--log-level", ("info", "debug")[number])
            ),  # else it is reused
        )
        made.append(pod.run(config, server.url))
        again = pod.run(config, server.url)
        assert (again.reused, again.artifact) == (True, made[-1].artifact)
    assert ["06 May 2031" in printed[0], "08 July 2032" in printed[1]] == [True, True]  # else this shows nothing
    assert [outcome.failure for outcome in made] == [None, None]
    assert made[0].artifact.digest == made[1].artifact.digest
    # What the template refuses costs itself, and is counted.
    assert (made[0].result.prompts, made[0].result.refused) == (3, 2)
    account = json.loads((pod.files(made[0]) / "rows.json").read_text())["asked"][0]
    assert account["dropped"] == {DropReason.TEMPLATE_REFUSED: 2}
    assert sorted(line.split("refuses the conversation: ")[1] for line in account["examples"]["TemplateRefused"]) == [
        "a short id",
        "roles must alternate",
    ]
