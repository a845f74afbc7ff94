"""A conversation as the target's own chat template renders it, in token ids: those of SGLang for the same messages.

What SGLang 0.5.23 does with messages before a template sees them is done here too (`OpenAIServingChat`, its models of
requests, `process_content_for_template_format`), since templates print what they are given: a null in a tool call or a
tool's description is text in the prompt. tests/serving/test_chat.py compares the two.
"""

import datetime as dt
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import TemplateError, nodes

from osprey_api.conditions import FailureReason
from osprey_api.rows import DropReason
from osprey_runtime.conversation import Conversation, Message
from osprey_runtime.data import DropError
from osprey_runtime.errors import StageError

PINNED_DATE = dt.date(2026, 1, 1)
"""What a template that prints today's date prints: a prompt is the same in every run of every stage."""
_MEDIA = ("image", "audio", "video", "vision")
"""A template with one of these words takes contents as lists of parts."""


class Chat:
    """Renders prompts with the tokenizer and the chat template of a model's folder."""

    def __init__(self, folder: Path) -> None:
        """Load them.

        Raises:
            StageError: UNSUPPORTED_MODEL: the folder has no tokenizer, or its tokenizer no chat template.
        """
        # Imported here: it takes seconds, and `fetch` and `sync` never need it.
        from transformers import AutoTokenizer  # noqa: PLC0415

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise StageError(
                FailureReason.UNSUPPORTED_MODEL,
                f"the target's tokenizer cannot be loaded from {folder}: {error}; "
                "a target needs tokenizer.json and tokenizer_config.json beside its weights",
            ) from error
        if not self._tokenizer.chat_template:
            raise StageError(
                FailureReason.UNSUPPORTED_MODEL,
                "the target's tokenizer has no chat template, so a prompt cannot be rendered as it would be served; "
                "name an instruction-tuned target, or add chat_template.jinja to its folder",
            )
        self._takes_parts = takes_parts(self._tokenizer.chat_template)
        own = inspect.signature(self._tokenizer.apply_chat_template).parameters.values()
        self._reserved = {each.name for each in own if each.kind is not each.VAR_KEYWORD} | {"strftime_now"}

    def render(self, conversation: Conversation, defaults: Mapping[str, Any]) -> list[int]:
        """Return the ids of a conversation, up to where the answer begins.

        The template writes the special tokens, so the tokenizer adds none of its own.

        Args:
            conversation: with options of the template, if it has any.
            defaults: what the server gives the template where the conversation says nothing else.

        Raises:
            DropError: TEMPLATE_REFUSED.
        """
        messages = [_as_served(message, takes_parts=self._takes_parts) for message in conversation.messages]
        tools = [_tool_as_served(tool) for tool in conversation.tools or ()] or None
        options = {**defaults, **conversation.options}
        if reserved := sorted(self._reserved & options.keys()):
            raise DropError(
                DropReason.TEMPLATE_REFUSED,
                f"{', '.join(reserved)} in chat_template_kwargs is no option of the template: remove it",
            )
        try:
            try:
                return self._ids(messages, tools, options)
            except Exception:
                if not tools:
                    raise
                # Some templates take tools without OpenAI's wrapper, and SGLang tries that second.
                return self._ids(messages, [tool["function"] for tool in tools], options)
        except (TemplateError, TypeError, ValueError) as error:
            raise DropError(
                DropReason.TEMPLATE_REFUSED, f"the target's chat template refuses the conversation: {error}"
            ) from error

    def _ids(self, messages: list[Message], tools: list[dict[str, Any]] | None, options: dict[str, Any]) -> list[int]:
        ids = self._tokenizer.apply_chat_template(
            messages,
            tools=tools,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            strftime_now=PINNED_DATE.strftime,
            **options,
        )
        return [int(token) for token in ids]


def takes_parts(template: str) -> bool:
    """Say whether a template goes over the parts of a content; to the others they are given as one text."""
    if any(word in template for word in _MEDIA):
        return True
    try:
        tree = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)  # noqa: S701 - not rendered
    except TemplateError:
        return False
    return any(_is_content(loop.iter) for loop in tree.find_all(nodes.For))


def _is_content(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Filter | nodes.Test) and node.node is not None:
        return _is_content(node.node)
    if isinstance(node, nodes.Getitem):
        if isinstance(node.arg, nodes.Slice):
            return _is_content(node.node)
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content" and _is_message(node.node)
    return isinstance(node, nodes.Getattr) and node.attr == "content" and _is_message(node.node)


def _is_message(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Name) and node.name in {"message", "msg", "m"}


def _as_served(message: Message, *, takes_parts: bool) -> Message:
    content = message["content"]
    if isinstance(content, list) and (message["role"] == "tool" or not takes_parts):
        content = " ".join(part["text"] for part in content)
    if message["role"] == "user":
        return {"role": "user", "content": content}
    served = {"role": message["role"], "content": content}
    served |= {name: message[name] for name in ("tool_call_id", "name", "reasoning_content") if name in message}
    if calls := message.get("tool_calls"):
        served["tool_calls"] = [
            {"id": call.get("id"), "index": None, "type": "function", "function": call["function"]} for call in calls
        ]
    return served


def _tool_as_served(tool: dict[str, Any]) -> dict[str, Any]:
    function = dict(tool["function"])
    for name in ("description", "parameters"):
        function.setdefault(name, None)
    known = ("description", "name", "parameters", "strict", "defer_loading")
    described = {
        name: value
        for name, value in function.items()
        if name in known and not (name in {"strict", "defer_loading"} and value is None)
    }
    return {"type": "function", "function": described, "defer_loading": None}
