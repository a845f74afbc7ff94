"""Print the prompt ids that SGLang's chat endpoint has a multimodal model given, without and with Osprey's plugin.

Standard input: [folder of a tokenizer, request].
"""

import json
import sys
from collections import OrderedDict
from types import SimpleNamespace

from served_ids import endpoint
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.plugins import load_plugins


def ids(folder: str, fields: dict) -> list[int]:
    chat = endpoint(folder)
    chat._chat_template_cache = OrderedDict()
    chat.tokenizer_manager.model_config = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=["Gemma3ForConditionalGeneration"])
    )
    chat.template_manager.chat_template_name = None
    processed = chat._apply_jinja_template(ChatCompletionRequest(model="x", **fields), None, True)
    if chat._can_reuse_text_only_prompt_ids(processed, True):
        return processed.prompt_ids
    kind, prompt = chat._engine_prompt(processed, True)
    # As the tokenizer manager does with the text of a request.
    return chat.tokenizer_manager.tokenizer(prompt)["input_ids"] if kind == "text" else prompt


asked = json.loads(sys.stdin.read())
found = [ids(*asked)]
load_plugins()
print(json.dumps([*found, ids(*asked)]))  # noqa: T201 - the test reads it
