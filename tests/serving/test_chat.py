"""Prompts as the target's own template renders them, and as SGLang does."""

import datetime as dt
import json
import os
import subprocess
import sys
from pathlib import Path

import cpu_kernels_launch as launch  # the module that tests/serving/conftest.py has loaded
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from osprey_api.conditions import FailureReason
from osprey_api.rows import DropReason
from osprey_runtime.conversation import Conversation, conversation
from osprey_runtime.data import DropError
from osprey_runtime.data.row import Row
from osprey_runtime.errors import StageError
from osprey_serving.chat import PINNED_DATE, Chat


def make_folder(folder: Path, template: str | None = None) -> Path:
    """A byte-level tokenizer that adds <s> by itself."""
    vocabulary = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def lone(text: str) -> Conversation:
    return Conversation.of([{"role": "user", "content": text}])


def rendered(folder: Path, template: str, prompt: Conversation) -> str:
    chat = Chat(make_folder(folder, template))
    return chat._tokenizer.decode(chat.render(prompt, {}))


def test_the_first_token_is_not_doubled(tmp_path):
    message = "{{ messages[0]['role'] }}: {{ messages[0]['content'] }}"
    template = "{{ bos_token }}" + message + "{% if add_generation_prompt %}>{% endif %}"
    assert rendered(tmp_path, template, lone("hi ✓")) == "<s>user: hi ✓>"


def test_a_template_that_prints_the_date_prints_the_same_one_every_day(tmp_path):
    template = "{{ strftime_now('%d %B %Y') }}|{{ messages[0]['content'] }}"
    assert rendered(tmp_path, template, lone("hi")) == f"{PINNED_DATE:%d %B %Y}|hi"
    assert dt.date.today() != PINNED_DATE  # noqa: DTZ011 - else this shows nothing today


def test_a_date_that_is_set_for_the_server_is_printed_by_all(tmp_path):
    """As Llama 3.1's template takes it."""
    template = "{% if date_string is not defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    chat = Chat(make_folder(tmp_path, template + "{{ date_string }}"))
    printed = [chat._tokenizer.decode(chat.render(lone("hi"), options)) for options in ({}, {"date_string": "Monday"})]
    assert printed == ["01 Jan 2026", "Monday"]


def test_without_a_template_there_is_no_guess(tmp_path):
    with pytest.raises(StageError, match=r"no chat template.*chat_template\.jinja") as caught:
        Chat(make_folder(tmp_path))
    assert caught.value.reason is FailureReason.UNSUPPORTED_MODEL


def test_a_folder_without_a_tokenizer_is_told(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(StageError, match=r"tokenizer\.json") as caught:
        Chat(tmp_path)
    assert caught.value.reason is FailureReason.UNSUPPORTED_MODEL


STRICT = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m['content'] }}{% endfor %}"
)


def test_a_conversation_that_the_template_refuses_costs_itself(tmp_path):
    chat = Chat(make_folder(tmp_path, STRICT))
    twice = Conversation.of([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    with pytest.raises(DropError, match="roles must alternate") as caught:
        chat.render(twice, {})
    assert caught.value.reason is DropReason.TEMPLATE_REFUSED
    assert chat._tokenizer.decode(chat.render(lone("a"), {})) == "a"


@pytest.mark.parametrize(
    "option", ["continue_final_message", "truncation", "max_length", "padding", "tokenize", "strftime_now", "tools"]
)
def test_options_that_are_none_of_the_templates_cost_the_conversation(tmp_path, option):
    chat = Chat(make_folder(tmp_path, "{{ messages[0]['content'] }}"))
    asked = Conversation.of([{"role": "user", "content": "a"}], options={option: 2})
    with pytest.raises(DropError, match=f"{option} in chat_template_kwargs.*remove it") as caught:
        chat.render(asked, {})
    assert caught.value.reason is DropReason.TEMPLATE_REFUSED


# ------------------------------------------------------------------------------------------ as SGLang does

TEMPLATES = {
    "chatml": (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
    "bos": "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] | trim }}{% endfor %}[/]",
    "thinking": (
        "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
        "{% for m in messages %}<|{{ m.role }}|>"
        "{% if m.reasoning_content is defined and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{{ m.content.split('</think>')[-1] }}"
        "{% for call in m.tool_calls or [] %}<call>{{ call.function.name }} {{ call.function.arguments | tojson }}"
        "{% for k, v in call.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}</call>{% endfor %}"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
    ),
    # As Qwen3's: of earlier turns what they thought is left out, and a request may ask not to think.
    "qwen3": (
        "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% set said = m.content %}{% set thought = m.reasoning_content or '' %}"
        "{% if m.role == 'assistant' and '</think>' in said %}"
        "{% set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
        "{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}"
        "{% if thought and loop.index0 > ns.last %}<think>\n{{ thought }}\n</think>\n\n{% endif %}"
        "{{ said }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
        "{% endif %}"
    ),
    "parts": (
        "{% for message in messages %}<|{{ message.role }}|>{% if message.content is string %}{{ message.content }}"
        "{% else %}{% for part in message['content'] %}({{ part.type }}:{{ part.text }}){% endfor %}{% endif %}"
        "{% endfor %}"
    ),
    "printing": "{% for m in messages %}{{ m | tojson }}{% endfor %}{{ tools | tojson }}",
    "flat tools": (
        "{% for tool in tools or [] %}{% if tool.function is defined %}{{ raise_exception('no wrapper') }}{% endif %}"
        "{{ tool.name }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    ),
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "ä", "parameters": {"type": "object", "b": 1, "a": 2}},
    },
    {"type": "function", "function": {"parameters": {}, "name": "g", "strict": True}},
    {"type": "function", "function": {"name": "h"}},
]


def calls(arguments, **more):
    return [{"type": "function", "function": {"name": "f", "arguments": arguments}, **more}]


USER = {"role": "user", "content": "Hi ✓ "}
REQUESTS = {
    "a lone message": {"messages": [USER]},
    "a system message": {"messages": [{"role": "system", "content": "S"}, USER]},
    "turns": {"messages": [USER, {"role": "assistant", "content": "<think>no</think>Ho"}, USER]},
    "reasoning": {"messages": [USER, {"role": "assistant", "content": "Ho", "reasoning_content": "hm"}, USER]},
    "no thinking": {
        "messages": [USER, {"role": "assistant", "content": "<think>\nno\n</think>\n\nHo"}, USER],
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "parts": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    },
    "one part": {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
    "two users": {"messages": [{**USER, "name": "Ada"}, USER]},
    "a developer": {"messages": [{"role": "developer", "content": "D"}, USER]},
    "tools": {"messages": [USER], "tools": TOOLS},
    "calls": {
        "messages": [
            USER,
            {"role": "assistant", "content": None, "tool_calls": calls('{"b": [1], "a": "ä"}', id="c1")},
            {"role": "tool", "content": [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}], "name": "f"},
            {"role": "assistant", "content": "so", "tool_calls": [*calls({"x": None}), *calls("{}")]},
            {"role": "tool", "content": "", "tool_call_id": "c2"},
        ],
        "tools": TOOLS,
    },
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: make_folder(tmp_path_factory.mktemp("model"), text) for name, text in TEMPLATES.items()}


@pytest.fixture(scope="module")
def served(folders):
    """Ids by template and request, from SGLang in a process of its own."""
    names = [(template, request) for template in TEMPLATES for request in REQUESTS]
    questions = [[str(folders[template]), REQUESTS[request]] for template, request in names]
    return dict(zip(names, answers("served_ids.py", questions), strict=True))


def answers(program: str, questions: list):
    answer = subprocess.run(
        [sys.executable, Path(__file__).parent / "programs" / program],
        input=json.dumps(questions).encode(),
        env=launch.environment(os.environ),  # noqa: TID251 - a child inherits the environment
        stdout=subprocess.PIPE,
        check=True,
        timeout=900,
    )
    return json.loads(answer.stdout.splitlines()[-1])


@pytest.mark.timeout(1000)  # SGLang is imported, which takes minutes where others have the cores
@pytest.mark.parametrize("template", TEMPLATES)
def test_ids_are_those_of_sglang(folders, served, template):
    chat = Chat(folders[template])
    for name, request in REQUESTS.items():
        found = chat.render(conversation(Row("x.jsonl", 1, request), None), {})
        assert chat._tokenizer.decode(found) == chat._tokenizer.decode(served[template, name]), name
        assert found == served[template, name], name


@pytest.mark.timeout(1000)
def test_with_the_plugin_a_multimodal_target_is_given_these_ids_too(folders):
    request = REQUESTS["turns"]
    without, found = answers("multimodal_ids.py", [str(folders["bos"]), request])
    assert found == Chat(folders["bos"]).render(conversation(Row("x.jsonl", 1, request), None), {})
    assert found.count(0) == 1
    assert without == [0, *found]  # where SGLang mends this, the hook can go


def test_arguments_as_text_and_as_an_object_give_the_same_ids(folders):
    chat = Chat(folders["thinking"])
    ids = [
        chat.render(
            conversation(
                Row("x.jsonl", 1, {"messages": [USER, {"role": "assistant", "tool_calls": calls(arguments)}, USER]}),
                None,
            ),
            {},
        )
        for arguments in ('{"a": 1}', {"a": 1})
    ]
    assert ids[0] == ids[1]


def test_thinking_of_earlier_turns_is_left_out_where_the_template_does_so(folders):
    def prompt(request, **options):
        chat = Chat(folders["qwen3"])
        return chat._tokenizer.decode(chat.render(conversation(Row("x.jsonl", 1, request), None), options))

    said = "<|im_start|>user\nHi ✓ <|im_end|>\n<|im_start|>assistant\n"
    earlier = f"{said}Ho<|im_end|>\n{said}"
    closed = "<think>\n\n</think>\n\n"
    assert prompt(REQUESTS["a lone message"]) == said
    assert prompt(REQUESTS["turns"]) == prompt(REQUESTS["reasoning"]) == earlier
    assert prompt(REQUESTS["no thinking"]) == earlier + closed
    # What the server is told by its arguments holds where a request says nothing else.
    assert prompt(REQUESTS["turns"], enable_thinking=False) == earlier + closed
    assert (
        prompt({**REQUESTS["no thinking"], "chat_template_kwargs": {"enable_thinking": True}}, enable_thinking=False)
        == earlier
    )
