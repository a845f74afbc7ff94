"""The tokenizer of a model folder, as this package uses it: whole text to ids, without special tokens around it."""

import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from osprey_api.conditions import FailureReason
from osprey_runtime.errors import StageError
from osprey_trainer.vocabulary import load_tokenizer

GROUP_CHARACTERS = 2_000_000
"""Enough to keep all cores busy."""
_PIECE_CHARACTERS = 1_000_000
"""A longer text is encoded in pieces: `tokenizers` holds 140 to 190 times a text's size (measured)."""
_BETWEEN_WORDS = re.compile(r"(?<=\w)(?= \w)")
_SEARCHED = 10_000
_PROBE = ("An owl", " flies by")
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
        cuts: a piece that begins between two words has the tokens that it has within the text. It has not where a
            text's begin is marked like a space, as by tokenizers of Llama 2's form.
    """

    tokenizer: Tokenizer
    end_id: int
    size: int
    cuts: bool

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
        whole, *pieces = (tokenizer.encode(text, add_special_tokens=False).ids for text in ("".join(_PROBE), *_PROBE))
        return cls(tokenizer, hf.eos_token_id, max(ids) + 1, cuts=whole == [id_ for piece in pieces for id_ in piece])

    def encode(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        """Ids of each text, in parallel over texts; neither a begin nor an end token is added.

        A text of more than a million characters is cut between two words where the tokenizer allows it (`cuts`); one
        without a space between words for ten thousand characters is cut where it is, which may cost a token.
        """
        pieces = [list(_pieces(text)) if self.cuts else [text] for text in texts]
        ids: list[npt.NDArray[np.uint32]] = []
        for group in grouped(piece for each in pieces for piece in each):
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


def grouped(texts: Iterable[str]) -> Iterator[list[str]]:
    """Texts in their order, as many at a time as keep all cores busy."""
    group: list[str] = []
    characters = 0
    for text in texts:
        group.append(text)
        characters += len(text)
        if characters >= GROUP_CHARACTERS:
            yield group
            group, characters = [], 0
    if group:
        yield group
