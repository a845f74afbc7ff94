"""The tokenizer of a model folder, as this package uses it: whole text to ids, without special tokens around it."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from osprey_api.conditions import FailureReason
from osprey_runtime.errors import StageError
from osprey_trainer.vocabulary import load_tokenizer

_COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


def copy_companions(source: Path, destination: Path) -> None:
    """Copies what makes weights a usable model folder: the tokenizer's files and the generation config."""
    destination.mkdir(parents=True, exist_ok=True)
    for name in _COMPANIONS:
        if (source / name).exists():
            shutil.copyfile(source / name, destination / name)


@dataclass(frozen=True)
class DocumentTokenizer:
    """Encodes documents.

    Attributes:
        end_id: the token that ends a text of this model.
        size: every id is below this.
    """

    tokenizer: Tokenizer
    end_id: int
    size: int

    @classmethod
    def load(cls, folder: Path) -> "DocumentTokenizer":
        """Reads the tokenizer of a local model folder.

        Raises:
            StageError: UNSUPPORTED_MODEL if there is none, or it has no end token.
        """
        hf = load_tokenizer(folder)
        tokenizer: Tokenizer | None = getattr(hf, "backend_tokenizer", None)
        if tokenizer is None or hf.eos_token_id is None:
            missing = "fast version" if tokenizer is None else "end token (eos_token)"
            raise StageError(
                FailureReason.UNSUPPORTED_MODEL,
                f"The model's tokenizer has no {missing}, which Stage 2 needs: choose another source model.",
            )
        tokenizer.no_truncation()
        tokenizer.no_padding()
        ids = tokenizer.get_vocab(with_added_tokens=True).values()  # their number says too little: ids may have holes
        return cls(tokenizer, hf.eos_token_id, max(ids) + 1)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, in parallel over texts; neither a begin nor an end token is added."""
        return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]
