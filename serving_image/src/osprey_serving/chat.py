"""A user's message as the target's own chat template renders it, in token ids."""

import datetime as dt
from pathlib import Path

from jinja2 import TemplateError

from osprey_api.conditions import FailureReason
from osprey_runtime.errors import StageError

PINNED_DATE = dt.date(2026, 1, 1)
"""What a template that prints today's date prints: a prompt is the same in every run of every stage."""


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

    def render(self, prompt: str) -> list[int]:
        """Return the ids of a conversation that is one user's message, up to where the answer begins.

        The template writes the special tokens, so the tokenizer adds none of its own.

        Raises:
            StageError: UNSUPPORTED_MODEL: the template refuses a conversation of one user's message.
        """
        try:
            ids = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                strftime_now=PINNED_DATE.strftime,
            )
        except TemplateError as error:
            raise StageError(
                FailureReason.UNSUPPORTED_MODEL,
                f"the target's chat template refuses a conversation of one user's message: {error}",
            ) from error
        return [int(token) for token in ids]
