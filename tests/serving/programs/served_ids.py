"""Print the prompt ids that SGLang's own chat endpoint makes of requests: [[folder of a tokenizer, request], …]."""

import json
import sys
from types import SimpleNamespace

from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.parser.jinja_template_utils import (
    detect_jinja_template_content_format,
    jinja_template_may_reorder_tool_results,
)
from sglang.srt.utils.hf_transformers_utils import get_tokenizer


def endpoint(folder: str) -> OpenAIServingChat:
    """The endpoint with a tokenizer, and without the server around it."""
    chat = object.__new__(OpenAIServingChat)
    tokenizer = get_tokenizer(folder)
    chat.tokenizer_manager = SimpleNamespace(tokenizer=tokenizer, served_model_name="x")
    chat.template_manager = SimpleNamespace(
        jinja_template_content_format=detect_jinja_template_content_format(tokenizer.chat_template),
        jinja_template_may_reorder_tool_results=jinja_template_may_reorder_tool_results(tokenizer.chat_template),
        reasoning_config=None,
        python_chat_template=None,
    )
    chat._encoding_adapter = chat.chat_encoding_spec = None
    chat.is_minimax_m3 = False
    chat._tokenizer_auto_adds_specials = len(tokenizer.encode("")) > 0
    chat._prompt_text_round_trip_is_lossy = chat._probe_prompt_text_round_trip()
    return chat


def ids(folder: str, fields: dict) -> list[int]:
    request = ChatCompletionRequest(model="x", **fields)
    tools = [tool.model_dump() for tool in request.tools] if request.tools else None
    return list(endpoint(folder)._apply_jinja_template(request, tools, False).prompt_ids)


if __name__ == "__main__":
    print(json.dumps([ids(*question) for question in json.loads(sys.stdin.read())]))  # noqa: T201 - the test reads it
