"""The prompt of a chat as the template wrote it, also where the target could see images.

SGLang 0.5.23 renders a chat into token ids. For a multimodal target whose tokenizer begins each text by itself, such as
Gemma 3, it makes text of them again, and of the text ids that begin twice: the model is served other prompts than it
was trained and evaluated on. So the ids are handed on, as they are for every other target.
"""

import copy
from collections.abc import Callable
from typing import Any

TARGET = "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._can_reuse_text_only_prompt_ids"


def keep_ids(original: Callable[[Any, Any, bool], bool], chat: Any, processed: Any, is_multimodal: bool) -> bool:  # noqa: FBT001 - SGLang's
    """Say whether the ids of a prompt can be used: where it has text alone, whatever the tokenizer adds."""
    if chat._tokenizer_auto_adds_specials:  # noqa: SLF001 - no public way
        chat = copy.copy(chat)
        chat._tokenizer_auto_adds_specials = False  # noqa: SLF001
    return original(chat, processed, is_multimodal)
