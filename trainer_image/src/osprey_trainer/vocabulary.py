"""The backbone's rows for the target's tokens, and the drafter's share of the target's tokens.

Tokens are compared by the bytes they stand for. Their surface strings mislead: `Ġthe` and `▁the` are the same
bytes, `<0x0A>` is a newline, and a byte-level piece may be half a character. Special tokens stand for no bytes;
they are matched by role, since the same string means different things in different models.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer

from osprey_api.conditions import FailureReason
from osprey_runtime.errors import StageError

# Markers of chat templates, by what they do. A marker's role counts before bos, eos and pad: `<|im_start|>` is
# some models' bos, but what it does is to open a turn.
_CHAT_MARKERS = {
    "turn_start": ("<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "<|header_start|>"),
    "role_end": ("<|end_header_id|>", "<|header_end|>"),
    "turn_end": ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|eot|>"),
}
_NAMED_ROLES = ("eos", "bos", "pad", "unk")
_STAND_INS = {"turn_end": "eos"}  # a base model ends its only turn so


def load_tokenizer(folder: Path) -> Any:
    """Returns the transformers tokenizer of a local model folder.

    Raises:
        StageError: UNSUPPORTED_MODEL if there is none.
    """
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise StageError(
            FailureReason.UNSUPPORTED_MODEL,
            f"{folder.name} has no tokenizer that transformers can read ({error}): put the tokenizer.json of its "
            "model beside its weights.",
        ) from error


@dataclass(frozen=True)
class TokenTable:
    """What every id of a tokenizer stands for.

    Attributes:
        strings: surface string by id.
        content: bytes by id, of ordinary tokens.
        byte_pieces: ids of SentencePiece's `<0xNN>`, twins of ordinary one-byte tokens.
        special: surface string by id, of special tokens.
        added: ids that were given out beside the tokenizer's own vocabulary, all special ones among them.
        roles: id by role ("bos", "eos", "pad", "unk", "turn_start", "role_end", "turn_end").
        tokenizer: used to split the text of foreign tokens.
    """

    strings: Mapping[int, str]
    content: Mapping[int, bytes]
    byte_pieces: frozenset[int]
    special: Mapping[int, str]
    added: frozenset[int]
    roles: Mapping[str, int]
    tokenizer: Tokenizer

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Reads the tokenizer of a local model folder.

        Raises:
            StageError: UNSUPPORTED_MODEL if there is none, or it is neither byte-level nor SentencePiece.
        """
        return cls.from_hf(load_tokenizer(folder))

    @classmethod
    def from_hf(cls, hf: Any) -> Self:
        """Of a transformers tokenizer; see `load`."""
        tokenizer: Tokenizer = hf.backend_tokenizer
        description = json.loads(tokenizer.to_str())
        byte_level = _is_byte_level(description)
        added = {token["id"]: token for token in description["added_tokens"]}
        strings = {index: token for token, index in tokenizer.get_vocab(with_added_tokens=True).items()}
        special = {index: token["content"] for index, token in added.items() if token["special"]}
        content, byte_pieces = {}, set()
        for index, string in strings.items():
            if index in special:
                continue
            if index in added:
                content[index] = string.encode()
            elif byte_level:
                content[index] = _byte_level_bytes(string)
            elif _is_byte_piece(string):
                content[index] = bytes([int(string[3:5], 16)])
                byte_pieces.add(index)
            else:
                content[index] = string.replace("▁", " ").encode()
        return cls(strings, content, frozenset(byte_pieces), special, frozenset(added), _roles(hf, special), tokenizer)

    @property
    def size(self) -> int:
        """Ids are below this; rows of a model from here on are padding."""
        return max(self.strings) + 1

    @property
    def digest(self) -> str:
        """By which two vocabularies are told apart: `sha256:` of the bytes of the tokenizer's own tokens, by id.

        Added tokens are left out: fine-tuned models rename them, and a drafter hardly ever proposes one.
        """
        found = hashlib.sha256()
        for index, content in sorted(self.content.items()):
            if index not in self.added:
                found.update(f"{index} {len(content)} ".encode() + content)
        return f"sha256:{found.hexdigest()}"

    @cached_property
    def by_content(self) -> dict[bytes, int]:
        """Lowest id of every byte string; ordinary tokens win over byte pieces."""
        order = sorted(self.content, key=lambda index: (index in self.byte_pieces, index))
        found: dict[bytes, int] = {}
        for index in order:
            found.setdefault(self.content[index], index)
        return found

    @cached_property
    def by_byte_piece(self) -> dict[bytes, int]:
        """Id of every byte piece."""
        return {self.content[index]: index for index in sorted(self.byte_pieces)}

    def decompose(self, contents: Sequence[bytes]) -> list[tuple[int, ...]]:
        """Ids whose bytes, joined, are each of the byte strings; empty where there is no such split.

        Whole text is split as the tokenizer itself would, which is how its model met it; the rest (half
        characters, text that the tokenizer changes) by the longest match from the left.
        """
        texts = [content.decode(errors="ignore") for content in contents]
        encodings = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        return [
            tuple(encoding.ids)
            if b"".join(self.content.get(index, b"\xff") for index in encoding.ids) == content
            else self._longest_match(content)
            for content, encoding in zip(contents, encodings, strict=True)
        ]

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self.by_content), default=0)

    def _longest_match(self, content: bytes) -> tuple[int, ...]:
        ids, start = [], 0
        while start < len(content):
            for end in range(min(len(content), start + self._longest), start, -1):
                index = self.by_content.get(content[start:end])
                if index is not None:
                    ids.append(index)
                    start = end
                    break
            else:
                return ()
        return tuple(ids)


@dataclass(frozen=True)
class Alignment:
    """A target's vocabulary in terms of a source's rows.

    Attributes:
        sources: for each row of the target the source rows whose mean it becomes; one: a copy; none: the mean
            of all other rows, which never wins an argmax.
        copied: tokens that are one source row.
        composed: tokens that are the mean of several.
        left: tokens that nothing corresponds to (padding rows are not counted).
    """

    sources: tuple[tuple[int, ...], ...]
    copied: int
    composed: int
    left: int

    def apply(self, table: Tensor) -> Tensor:
        """table: [source rows, H] -> [target rows, H]."""
        lengths = torch.tensor([len(rows) for rows in self.sources])
        flat = torch.tensor([row for rows in self.sources for row in rows], dtype=torch.long)
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)[:-1]])
        aligned = functional.embedding_bag(flat, table.float(), offsets, mode="mean")
        matched = lengths > 0
        aligned[~matched] = aligned[matched].mean(0)
        return aligned.to(table.dtype)


def align(source: TokenTable, target: TokenTable, *, source_rows: int, target_rows: int) -> Alignment:
    """Finds the source rows of every row of the target.

    Args:
        source: tokenizer of the backbone.
        target: tokenizer of the target.
        source_rows: rows of the backbone's embedding.
        target_rows: rows of the target's embedding, padding included.

    Raises:
        StageError: INVALID_CONFIG if a tokenizer has ids beyond its model's rows.
    """
    for name, table, rows in (("backbone", source, source_rows), ("target", target, target_rows)):
        if table.size > rows:
            raise StageError(
                FailureReason.INVALID_CONFIG,
                f"The tokenizer of the {name} has ids up to {table.size - 1}, but its model has {rows} rows: "
                "they do not belong together.",
            )
    rows_of = _same_rows(target) if source.strings == target.strings else _matching_rows(source, target)
    found = [rows for rows in rows_of.values() if rows]
    copied = sum(len(rows) == 1 for rows in found)
    return Alignment(
        sources=tuple(rows_of.get(index, ()) for index in range(target_rows)),
        copied=copied,
        composed=len(found) - copied,
        left=len(target.strings) - len(found),
    )


def _same_rows(target: TokenTable) -> dict[int, tuple[int, ...]]:
    return {index: (index,) for index in target.strings}


def _matching_rows(source: TokenTable, target: TokenTable) -> dict[int, tuple[int, ...]]:
    rows_of = {index: _special_rows(index, source, target) for index in target.special}
    foreign = []
    for index, content in target.content.items():
        twin = source.by_byte_piece.get(content) if index in target.byte_pieces else None
        row = source.by_content.get(content) if twin is None else twin
        if row is None:
            foreign.append(index)
        else:
            rows_of[index] = (row,)
    splits = source.decompose([target.content[index] for index in foreign])
    return rows_of | dict(zip(foreign, splits, strict=True))


def _special_rows(index: int, source: TokenTable, target: TokenTable) -> tuple[int, ...]:
    for role, owner in target.roles.items():
        if owner == index:
            for wanted in (role, _STAND_INS.get(role, role)):
                if wanted in source.roles:
                    return (source.roles[wanted],)
    if index in target.roles.values():
        return ()
    # Without a role on either side (fill-in-the-middle and the like) the spelling is all there is.
    without_role = source.special.keys() - set(source.roles.values())
    return tuple(row for row in sorted(without_role) if source.special[row] == target.special[index])[:1]


def _roles(hf: Any, special: Mapping[int, str]) -> dict[str, int]:
    by_string = {string: index for index, string in sorted(special.items(), reverse=True)}
    roles = {
        role: by_string[marker]
        for role, markers in _CHAT_MARKERS.items()
        for marker in reversed(markers)
        if marker in by_string
    }
    for role in _NAMED_ROLES:
        index = getattr(hf, f"{role}_token_id")
        if index is not None:
            roles[role] = index
    return roles


def _is_byte_level(description: Mapping[str, Any]) -> bool:
    parts = json.dumps([description["decoder"], description["pre_tokenizer"]])
    if '"ByteLevel"' in parts:
        return True
    if '"ByteFallback"' in parts or '"Metaspace"' in parts:
        return False
    raise StageError(
        FailureReason.UNSUPPORTED_MODEL,
        f"The tokenizer ({description['model'].get('type')}) is neither byte-level nor SentencePiece, so the "
        "bytes of its tokens are unknown; choose a model with a tokenizer of one of these kinds.",
    )


def _byte_alphabet() -> dict[str, int]:
    # GPT-2's printable stand-ins: visible Latin-1 characters are themselves, the other bytes follow U+0100.
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()


def _byte_level_bytes(string: str) -> bytes:
    if all(character in _BYTE_OF for character in string):
        return bytes(_BYTE_OF[character] for character in string)
    return string.encode()


def _is_byte_piece(string: str) -> bool:
    return len(string) == 6 and string.startswith("<0x") and string.endswith(">")


@dataclass(frozen=True)
class DraftVocabulary:
    """The target's tokens that the drafter can propose, chosen once and frozen in its checkpoint.

    Attributes:
        ids: int64 [Vd], ascending.
        vocab_size: V, rows of the target.
        coverage: share of the counted tokens that are among them.
    """

    ids: Tensor
    vocab_size: int
    coverage: float

    @classmethod
    def identity(cls, vocab_size: int) -> Self:
        """All tokens."""
        return cls(torch.arange(vocab_size), vocab_size, 1.0)

    @property
    def d2t(self) -> Tensor:
        """int64 [Vd]: target id minus draft id, so the identity is zeros."""
        return self.ids - torch.arange(len(self.ids))

    @property
    def t2d(self) -> Tensor:
        """Bool [V]: whether the drafter can propose a token."""
        return torch.zeros(self.vocab_size, dtype=torch.bool).index_fill(0, self.ids, value=True)


def choose_draft_vocabulary(counts: Tensor, size: int, *, num_tokens: int) -> DraftVocabulary:
    """The `size` most frequent tokens, by (-frequency, id); too few seen ones are joined by the lowest ids.

    Args:
        counts: int64 [V], how often each token occurs in the target's answers.
        size: tokens wanted; as many as there are, or more: all of them, and the mapping is the identity.
        num_tokens: ids from here on are padding and never chosen.

    Raises:
        StageError: INVALID_CONFIG for a size below one; INVALID_DATA if no token was counted.
    """
    vocab_size, total = len(counts), int(counts.sum())
    if size < 1:
        raise StageError(FailureReason.INVALID_CONFIG, f"draftVocabSize is {size}; it must be at least one token.")
    if total == 0:
        raise StageError(
            FailureReason.INVALID_DATA,
            "The answers hold no token, so no draft vocabulary can be chosen from them.",
        )
    if size >= num_tokens:
        return DraftVocabulary.identity(vocab_size)
    # A stable sort keeps equal counts in the order of their ids.
    order = counts[:num_tokens].argsort(descending=True, stable=True)
    ids = order[:size].sort().values
    return DraftVocabulary(ids, vocab_size, int(counts[ids].sum()) / total)
