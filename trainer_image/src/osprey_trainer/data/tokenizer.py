"""The tokenizer of a model folder, as this package uses it: whole text to ids, without special tokens around it."""

import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from osprey_api.conditions import FailureReason
from osprey_runtime.errors import StageError
from osprey_trainer.vocabulary import load_tokenizer

_PIECE_CHARACTERS = 1_000_000
"""A longer text is encoded in pieces: what `tokenizers` holds of a text is about 100 times as large."""
_BETWEEN_WORDS = re.compile(r"(?<=\w)(?= \w)")
_SEARCHED = 10_000
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

    def encode(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        """Ids of each text, in parallel over texts; neither a begin nor an end token is added.

        A text of more than a million characters is cut between two words, where tokenizers begin a new token anyway;
        one without spaces for ten thousand characters is cut where it is.
        """
        pieces = [list(_pieces(text)) for text in texts]
        ids: list[npt.NDArray[np.uint32]] = []
        for group in _groups([piece for each in pieces for piece in each]):
            encodings = self.tokenizer.encode_batch_fast(group, add_special_tokens=False)
            ids += [np.array(encoding.ids, np.uint32) for encoding in encodings]
        coming = iter(ids)
        return [np.concatenate([next(coming) for _ in each]) if len(each) > 1 else next(coming) for each in pieces]


def _pieces(text: str) -> Iterator[str]:
    begin = 0
    while len(text) - begin > _PIECE_CHARACTERS:
        limit = begin + _PIECE_CHARACTERS
        cuts = [found.start() for found in _BETWEEN_WORDS.finditer(text, max(begin + 1, limit - _SEARCHED), limit)]
        end = cuts[-1] if cuts else limit
        yield text[begin:end]
        begin = end
    yield text[begin:]


def _groups(pieces: Sequence[str]) -> Iterator[list[str]]:
    group: list[str] = []
    characters = 0
    for piece in pieces:
        group.append(piece)
        characters += len(piece)
        if characters >= 2 * _PIECE_CHARACTERS:
            yield group
            group, characters = [], 0
    if group:
        yield group
