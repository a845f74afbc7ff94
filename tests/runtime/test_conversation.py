"""Prompts in the shapes in which data sets write them; what is odd is dropped with a reason, and never cut to fit."""

import json

import pytest

from osprey_api.rows import DropReason
from osprey_runtime.conversation import Conversation, conversation
from osprey_runtime.data import DropError
from osprey_runtime.data.row import Row


def read(value: dict, field: str | None = None) -> Conversation:
    return conversation(Row("x.jsonl", 1, value), field)


def dropped(value: dict, field: str | None = None) -> tuple[DropReason, str]:
    with pytest.raises(DropError) as caught:
        read(value, field)
    return caught.value.reason, caught.value.detail


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def system(content):
    return {"role": "system", "content": content}


# ------------------------------------------------------------------------------------------------- shapes


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"prompt": "Hi"}, [user("Hi")]),
        ({"prompt": [system("S"), user("Hi")], "chosen": []}, [system("S"), user("Hi")]),
        ({"messages": [user("Hi"), assistant("Ho")]}, [user("Hi")]),
        ({"messages": [user("Hi"), assistant("Ho"), user("Bye")]}, [user("Hi"), assistant("Ho"), user("Bye")]),
        ({"prompt": None, "messages": [user("Hi")]}, [user("Hi")]),  # a table has all columns in all rows
        (
            {"conversations": [{"from": "system", "value": "S"}, {"from": "human", "value": "Hi"}]},
            [system("S"), user("Hi")],
        ),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]}, [user("Hi")]),
        ({"system": "S", "conversations": [{"from": "human", "value": "Hi"}]}, [system("S"), user("Hi")]),
        ({"system": "", "conversations": [{"from": "human", "value": "Hi"}]}, [user("Hi")]),
        ({"system": "other", "messages": [system("S"), user("Hi")]}, [system("S"), user("Hi")]),
        ({"instruction": "Sort", "input": "3 1 2", "output": "1 2 3"}, [user("Sort\n\n3 1 2")]),
        ({"instruction": "Sing", "input": "", "output": "La"}, [user("Sing")]),
        ({"instruction": "Sing", "output": "La"}, [user("Sing")]),
    ],
)
def test_shapes_are_recognised(value, expected):
    assert read(value).messages == expected


def test_a_field_that_is_named_is_the_one():
    value = {"prompt": "no", "question": "yes", "dialogue": [user("list")]}
    assert read(value, "question").messages == [user("yes")]
    assert read(value, "dialogue").messages == [user("list")]
    assert read({"instruction": "Sort", "input": "3 1 2"}, "instruction").messages == [user("Sort\n\n3 1 2")]


def test_an_unknown_shape_is_refused_with_what_to_set():
    reason, detail = dropped({"question": "x", "answer": "y"})
    assert reason is DropReason.NO_FIELD
    assert "set promptField to one of answer, question" in detail


def test_every_role_of_a_dialogue_is_kept():
    turns = [
        {"from": "system", "value": "S"},
        {"from": "human", "value": "Weather?"},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"at": "Rome"}}'},
        {"from": "observation", "value": "sunny"},
        {"from": "gpt", "value": "It is sunny."},
        {"from": "human", "value": "And there?"},
        {"from": "gpt", "value": "no idea"},
    ]
    call = {"type": "function", "function": {"name": "weather", "arguments": {"at": "Rome"}}}
    assert read({"conversations": turns}).messages == [
        system("S"),
        user("Weather?"),
        assistant("", tool_calls=[call]),
        {"role": "tool", "content": "sunny"},
        assistant("It is sunny."),
        user("And there?"),
    ]


def test_a_prompt_may_end_with_what_a_tool_said():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
    tool = {"role": "tool", "content": "42", "tool_call_id": "1", "name": "f"}
    turns = [user("?"), assistant(None, tool_calls=[call]), tool, assistant("It is 42.")]
    assert read({"messages": turns}).messages == [user("?"), assistant("", tool_calls=[call]), tool]


def test_reasoning_of_earlier_turns_is_kept():
    turns = [user("?"), assistant("yes", reasoning_content="hm"), user("sure?")]
    assert read({"messages": turns}).messages == turns


def test_options_of_the_template_belong_to_the_prompt():
    row = {"prompt": "?", "chat_template_kwargs": {"enable_thinking": False, "effort": None}}
    assert read(row).options == {"enable_thinking": False}
    assert read({"prompt": "?"}).options == read({"prompt": "?", "chat_template_kwargs": None}).options == {}
    unset = {"prompt": "?", "chat_template_kwargs": {"enable_thinking": None}}
    assert read(unset) == read({"prompt": "?"})
    assert read(row) != read({"prompt": "?"})  # it is answered otherwise
    assert read(row).content == read({"prompt": "?"}).content  # and yet must not be trained on where this is held out
    for odd in (["x"], "enable_thinking", {"chat_template": "{{ 1 }}"}):
        assert dropped({"prompt": "?", "chat_template_kwargs": odd})[0] is DropReason.WRONG_TYPE


# -------------------------------------------------------------------------------------- contents and calls


def test_a_content_is_text_parts_or_null_in_rows_of_one_file():
    parts = [{"type": "text", "text": "a"}, "b"]
    wanted = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert read({"messages": [user("a b")]}).messages == [user("a b")]
    assert read({"messages": [user(parts)]}).messages == [user(wanted)]
    assert read({"messages": [user("a b")]}).content == read({"messages": [user(parts)]}).content == "a b"
    assert dropped({"messages": [user(None)]})[0] is DropReason.BLANK_TURN


CALL = {"name": "f", "arguments": {"b": 1, "a": "ä"}}


@pytest.mark.parametrize(
    "calls",
    [
        [{"type": "function", "function": CALL}],
        [{"type": "function", "function": {**CALL, "arguments": json.dumps(CALL["arguments"])}}],
        json.dumps([{"type": "function", "function": CALL}]),
        [CALL],
        json.dumps(CALL),
        [{"function": json.dumps(CALL), "id": None}],
    ],
)
def test_tool_calls_in_one_spelling(calls):
    found = read({"messages": [user("?"), assistant("", tool_calls=calls), user("!")]})
    assert found.messages[1] == assistant("", tool_calls=[{"type": "function", "function": CALL}])
    assert list(found.messages[1]["tool_calls"][0]["function"]["arguments"]) == ["b", "a"]  # templates print the order


def test_two_calls_in_a_turn():
    found = read({"messages": [user("?"), assistant("", tool_calls=[CALL, CALL]), user("!")]})
    assert len(found.messages[1]["tool_calls"]) == 2


@pytest.mark.parametrize(
    "tools", [[{"type": "function", "function": {"name": "f", "parameters": {}}}], [{"name": "f", "parameters": {}}]]
)
def test_tools_of_a_row(tools):
    for written in (tools, json.dumps(tools), tools[0]):
        found = read({"prompt": "?", "tools": written})
        assert found.tools == [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        assert found.content != read({"prompt": "?"}).content
    assert read({"prompt": "?", "tools": "[]"}).tools is None


# ------------------------------------------------------------------------------------------------ odd rows


@pytest.mark.parametrize(
    ("turns", "reason", "words"),
    [
        ([], DropReason.EMPTY_CONVERSATION, "empty"),
        ([assistant("Ho"), user("Hi")], DropReason.OPENS_WITHOUT_USER, "assistant"),
        ([system("S"), assistant("Ho")], DropReason.OPENS_WITHOUT_USER, "assistant"),
        ([system("S")], DropReason.NO_QUESTION, "no turn of a user"),
        ([user("Hi"), system("S")], DropReason.NO_QUESTION, "system"),
        ([user(" \n")], DropReason.BLANK_TURN, "turn 1, of the user"),
        ([user("Hi"), assistant("")], DropReason.BLANK_TURN, "turn 2, of the assistant"),
        ([user("Hi"), assistant(None)], DropReason.BLANK_TURN, "calls no tool"),
        ([user("Hi"), "Ho"], DropReason.BAD_TURN, "turn 2 is text"),
        ([user("Hi"), None], DropReason.BAD_TURN, "turn 2 is null"),
        ([user("Hi"), {"role": "critic", "content": "x"}], DropReason.UNKNOWN_ROLE, "'critic'"),
        ([user("Hi"), {"content": "x"}], DropReason.UNKNOWN_ROLE, "None"),
        ([user("Hi"), {"role": 3, "content": "x"}], DropReason.UNKNOWN_ROLE, "3"),
        ([user({"a": 1})], DropReason.WRONG_TYPE, "an object"),
        ([user([7])], DropReason.BAD_TURN, "a number"),
        ([user([{"type": "image_url", "image_url": {"url": "x"}}])], DropReason.UNSUPPORTED_CONTENT, "image_url"),
        ([user("\ud800")], DropReason.BAD_CHARACTER, "surrogate"),
        ([user("?"), assistant("", tool_calls="{")], DropReason.BAD_TOOL_CALL, "no JSON"),
        ([user("?"), assistant("", tool_calls=[{"name": "f", "arguments": "{"}])], DropReason.BAD_TOOL_CALL, "of f"),
        (
            [user("?"), assistant("", tool_calls=[{"name": "f", "arguments": "[1]"}])],
            DropReason.BAD_TOOL_CALL,
            "a list",
        ),
        ([user("?"), assistant("", tool_calls=[{}])], DropReason.BAD_TOOL_CALL, "without the name"),
        ([{**user("?"), "tool_calls": [CALL]}, user("!")], None, ""),  # SGLang does not read them of a user either
    ],
)
def test_odd_conversations(turns, reason, words):
    value = {"messages": turns}
    if reason is None:
        assert read(value).messages == [user("?"), user("!")]
        return
    found, detail = dropped(value)
    assert found is reason
    assert words in detail


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"prompt": " "}, DropReason.BLANK_TURN),
        ({"prompt": 7}, DropReason.WRONG_TYPE),
        ({"messages": "Hi"}, None),
        ({"conversations": {"from": "human"}}, DropReason.WRONG_TYPE),
        ({"instruction": "", "output": "x"}, DropReason.BLANK_TURN),
        ({"instruction": "Sing", "input": 7, "output": "x"}, DropReason.WRONG_TYPE),
        ({"instruction": "Sing", "input": "", "output": " "}, DropReason.BLANK_TURN),
        ({"prompt": "?", "tools": "{"}, DropReason.BAD_TOOL_CALL),
        ({"prompt": "?", "tools": [1]}, DropReason.BAD_TOOL_CALL),
        ({"prompt": "?", "system": ["S"]}, DropReason.WRONG_TYPE),
        ({}, DropReason.NO_FIELD),
    ],
)
def test_odd_rows(value, reason):
    if reason is None:
        assert read(value).messages == [user("Hi")]
    else:
        assert dropped(value)[0] is reason


# ------------------------------------------------------------------------------------------------ identity


def test_a_lone_message_counts_by_its_text():
    assert read({"prompt": "ä\u2028"}).content == "ä\u2028"
    assert read({"prompt": "x"}).content != read({"prompt": "x", "system": "S"}).content


def test_the_order_of_keys_is_no_difference():
    one, other = ({"name": "f", "arguments": arguments} for arguments in ({"a": 1, "b": 2}, {"b": 2, "a": 1}))
    spelled = [read({"messages": [user("?"), assistant("", tool_calls=[call]), user("!")]}) for call in (one, other)]
    assert spelled[0].content == spelled[1].content
    assert spelled[0].spelled != spelled[1].spelled
