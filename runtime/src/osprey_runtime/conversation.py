"""A prompt as the messages that a chat server is sent, read from the shapes in which data sets write them.

The target answers itself, so a closing turn of the assistant is left out: what counts is all before it, system
message, earlier turns, tool calls and tools included. A row that can't be read so is dropped, never a turn of it.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from osprey_api.rows import DropReason
from osprey_runtime.data.ledger import DropError
from osprey_runtime.data.row import Row, kind, text_of

RECOGNISED = ("prompt", "messages", "conversations", "instruction")
"""Fields that hold a prompt, where the resource names none: the first of them that a row has."""

OPTIONS = "chat_template_kwargs"
"""Field with a row's options of the chat template, by the name that it has in requests to a server."""

Message = dict[str, Any]

_ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function": "function",
    "function_call": "assistant",
}
"""The words of OpenAI, and those of ShareGPT and its relatives."""
_BEFORE_USER = {"system", "developer"}
_QUESTIONS = {"user", "tool", "function"}
_TEXT_PARTS = {"text", "input_text"}


@dataclass(frozen=True)
class Conversation:
    """Messages up to where an answer begins, the tools that may be called, and options of the chat template.

    Attributes:
        spelled: canonical JSON of all, so that it can be kept by the million and compared.
    """

    spelled: str

    @classmethod
    def of(
        cls,
        messages: list[Message],
        tools: list[dict[str, Any]] | None = None,
        options: dict[str, Any] | None = None,
    ) -> "Conversation":
        """Spell them. The order of keys in schemas and arguments is kept, since templates print it."""
        value: dict[str, Any] = {"messages": messages}
        value |= ({"tools": tools} if tools else {}) | ({"options": options} if options else {})
        return cls(json.dumps(value, ensure_ascii=False, separators=(",", ":")))

    @property
    def messages(self) -> list[Message]:
        """As OpenAI's API takes them; arguments of tool calls are objects."""
        messages: list[Message] = json.loads(self.spelled)["messages"]
        return messages

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        """As OpenAI's API takes them."""
        tools: list[dict[str, Any]] | None = json.loads(self.spelled).get("tools")
        return tools

    @property
    def options(self) -> dict[str, Any]:
        """Of the chat template, such as `enable_thinking`: OpenAI's servers call them chat_template_kwargs."""
        options: dict[str, Any] = json.loads(self.spelled).get("options", {})
        return options

    @property
    def content(self) -> str:
        """What is asked: a lone user's message by its text, else all messages and tools, however spelled.

        The template's options are no part of it: a question is the same with and without thinking.
        """
        flat = [{**message, "content": _joined(message["content"])} for message in self.messages]
        if len(flat) == 1 and flat[0]["role"] == "user" and not self.tools:
            return str(flat[0]["content"])
        value = {"messages": flat, "tools": self.tools}
        return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))

    def rank(self, seed: int) -> bytes:
        """Return what orders prompts by content: SHA-256(seed + newline + content)."""
        return hashlib.sha256(f"{seed}\n{self.content}".encode()).digest()


def conversation(row: Row, field: str | None) -> Conversation:
    """Return the prompt of a row.

    Args:
        row: of a data set.
        field: that holds it: text, or a list of messages. None: the first of `RECOGNISED` that the row has.

    Raises:
        DropError: the row has none, or it is odd.
    """
    if field is None:
        field = next((name for name in RECOGNISED if row.value.get(name) is not None), None)
        if field is None:
            raise DropError(
                DropReason.NO_FIELD,
                f"no prompt is recognised (a field {', '.join(RECOGNISED)}): set promptField to one of "
                f"{', '.join(sorted(row.value)) or 'the fields, of which there are none'}",
            )
    if isinstance(row.value.get(field), list):
        messages = _messages(row.value[field], field)
    else:
        messages = [{"role": "user", "content": _question(row, field)}]
    system = _system(row)
    if system is not None and messages[0]["role"] not in _BEFORE_USER:
        messages.insert(0, {"role": "system", "content": system})
    options = _options(row.value.get(OPTIONS))
    found = Conversation.of(_up_to_answer(messages), _tools(row.value.get("tools")), options)
    text_of(found.spelled, f"the conversation of field {field!r}")
    return found


def _question(row: Row, field: str) -> str:
    """Return a text; with an instruction goes its input, without which it asks for something else."""
    text = row.text(field)
    if not text.strip():
        raise DropError(DropReason.BLANK_TURN, f"field {field!r} is blank")
    if field == "instruction":
        if (given := row.value.get("input")) is not None and text_of(given, "field 'input'").strip():
            text = f"{text}\n\n{given}"
        if (output := row.value.get("output")) is not None and not text_of(output, "field 'output'").strip():
            raise DropError(DropReason.BLANK_TURN, "field 'output' is blank: nobody could answer this instruction")
    return text


def _system(row: Row) -> str | None:
    for name in ("system", "system_prompt"):
        value = row.value.get(name)
        if value is not None and text_of(value, f"field {name!r}").strip():
            return str(value)
    return None


def _messages(turns: list[Any], field: str) -> list[Message]:
    if not turns:
        raise DropError(DropReason.EMPTY_CONVERSATION, f"field {field!r} is an empty list")
    messages = [_message(turn, f"turn {number}") for number, turn in enumerate(turns, start=1)]
    first = next((message["role"] for message in messages if message["role"] not in _BEFORE_USER), None)
    if first is None:
        raise DropError(DropReason.NO_QUESTION, "there is no turn of a user")
    if first != "user":
        raise DropError(DropReason.OPENS_WITHOUT_USER, f"the first turn is of {first} and not of a user")
    return messages


def _message(turn: Any, where: str) -> Message:
    if not isinstance(turn, dict):
        raise DropError(DropReason.BAD_TURN, f"{where} is {kind(turn)} and not an object")
    said = next((turn[name] for name in ("role", "from") if turn.get(name) is not None), None)
    role = _ROLES.get(said.lower()) if isinstance(said, str) else None
    if role is None:
        raise DropError(
            DropReason.UNKNOWN_ROLE, f"{where} is of role {said!r}; the roles are {', '.join(sorted(_ROLES))}"
        )
    value = next((turn[name] for name in ("content", "value") if turn.get(name) is not None), None)
    if role == "user":
        message: Message = {"role": role, "content": _content(value, where)}
        if not _joined(message["content"]).strip():
            raise DropError(DropReason.BLANK_TURN, f"{where}, of the user, is blank")
        return message
    if str(said).lower() == "function_call":
        return {"role": role, "content": "", "tool_calls": _calls(value, where)}
    message = {"role": role, "content": _content(value, where)}
    for name in ("tool_call_id", "name", "reasoning_content"):
        if turn.get(name) is not None:
            message[name] = text_of(turn[name], f"{where}, {name}")
    if turn.get("tool_calls"):
        if role != "assistant":
            raise DropError(DropReason.BAD_TOOL_CALL, f"{where} calls tools and is not of the assistant")
        message["tool_calls"] = _calls(turn["tool_calls"], where)
    if role == "assistant" and not (_joined(message["content"]).strip() or message.keys() - {"role", "content"}):
        raise DropError(DropReason.BLANK_TURN, f"{where}, of the assistant, is blank and calls no tool")
    return message


def _content(value: Any, where: str) -> str | list[dict[str, str]]:
    """Return text, or a list of parts of text. Null is no text."""
    if value is None:
        return ""
    if not isinstance(value, list):
        return text_of(value, where)
    return [_part(part, where) for part in value]


def _part(part: Any, where: str) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": text_of(part, where)}
    if not isinstance(part, dict):
        raise DropError(DropReason.BAD_TURN, f"{where} has a part that is {kind(part)}")
    if str(part.get("type")) not in _TEXT_PARTS:
        raise DropError(
            DropReason.UNSUPPORTED_CONTENT, f"{where} has a part of type {part.get('type')!r}; only text can be used"
        )
    return {"type": "text", "text": text_of(part.get("text"), where)}


def _joined(content: str | list[dict[str, str]]) -> str:
    """Return the text of a content, as SGLang joins parts for templates that take text alone."""
    return content if isinstance(content, str) else " ".join(part["text"] for part in content)


def _calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Return tool calls in one spelling: a list, in which arguments are objects, though data sets write text too."""
    found = _parsed(value, f"{where}, its tool calls")
    calls = found if isinstance(found, list) else [found]
    return [_call(call, where) for call in calls]


def _call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise DropError(DropReason.BAD_TOOL_CALL, f"{where} has a tool call that is {kind(call)}")
    function = _parsed(call["function"], where) if call.get("function") is not None else call
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise DropError(DropReason.BAD_TOOL_CALL, f"{where} has a tool call without the name of its function")
    given = next((function[key] for key in ("arguments", "parameters") if function.get(key) is not None), None)
    arguments = {} if given is None else _parsed(given, f"{where}, the arguments of {name}")
    if not isinstance(arguments, dict):
        raise DropError(
            DropReason.BAD_TOOL_CALL, f"{where}: the arguments of {name} are {kind(arguments)} and not an object"
        )
    made: dict[str, Any] = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**made, "type": "function", "function": {"name": name, "arguments": arguments}}


def _options(value: Any) -> dict[str, Any] | None:
    """Return options of the template, without those unset: in a table's column all rows have all of them."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise DropError(DropReason.WRONG_TYPE, f"field {OPTIONS!r} is {kind(value)} and not an object")
    if "chat_template" in value:
        raise DropError(DropReason.WRONG_TYPE, f"field {OPTIONS!r} brings a template of its own; the target's is used")
    return {name: option for name, option in value.items() if option is not None}


def _tools(value: Any) -> list[dict[str, Any]] | None:
    """Return descriptions of tools in one spelling."""
    if value is None or value in ("", [], {}):
        return None
    found = _parsed(value, "field 'tools'")
    tools = found if isinstance(found, list) else [found]
    return [_tool(tool) for tool in tools] or None


def _tool(tool: Any) -> dict[str, Any]:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DropError(DropReason.BAD_TOOL_CALL, "field 'tools' has a tool without a name")
    if function is tool:
        function = {key: item for key, item in function.items() if key != "type"}
    return {"type": "function", "function": function}


def _parsed(value: Any, what: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DropError(DropReason.BAD_TOOL_CALL, f"{what}: is no JSON ({error})") from None


def _up_to_answer(messages: list[Message]) -> list[Message]:
    """Return the messages before the closing ones of the assistant."""
    end = len(messages)
    while messages[end - 1]["role"] == "assistant":
        end -= 1
    if messages[end - 1]["role"] not in _QUESTIONS:
        raise DropError(
            DropReason.NO_QUESTION, f"the last turn is of {messages[end - 1]['role']}: nobody asks anything"
        )
    return messages[:end]
