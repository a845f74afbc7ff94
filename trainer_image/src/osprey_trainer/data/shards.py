"""Token shards: text as memory-mapped token ids. Several files, one stream.

A folder holds `shard-00000.bin`, `shard-00001.bin` and so on, little-endian ids without a header, and `index.json`.
Shards are cut at a fixed number of tokens, wherever that falls: a document may go on in the next file. Beside a full
shard, `shard-00000.end.json` says where in the text it ends, so that whoever writes can go on from there.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from osprey_api.conditions import FailureReason
from osprey_runtime.errors import StageError

INDEX_NAME = "index.json"
SHARD_TOKENS = 1 << 28
"""Tokens of a full shard: 512 MiB or 1 GiB, so that an interrupted transfer repeats little."""

_COUNTED_AT_ONCE = 1 << 24

_TYPES: dict[str, np.dtype[np.uint16] | np.dtype[np.uint32]] = {
    "uint16": np.dtype("<u2"),
    "uint32": np.dtype("<u4"),
}


@dataclass(frozen=True)
class Shard:
    """One file."""

    file: str
    tokens: int


@dataclass(frozen=True)
class ShardIndex:
    """`index.json`.

    Attributes:
        dtype: `uint16` or `uint32`.
        vocab_size: every id is below this.
        tokens: of all shards, separators included.
        rows: documents.
        document_separator_id: follows every document.
    """

    dtype: str
    vocab_size: int
    shards: tuple[Shard, ...]
    tokens: int
    rows: int
    document_separator_id: int

    def write(self, folder: Path) -> None:
        """Writes the index last: a folder without it is no finished set of shards."""
        (folder / INDEX_NAME).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> "ShardIndex":
        """Reads the index and checks the sizes of the files.

        Raises:
            StageError: CORRUPT_ARTIFACT.
        """
        try:
            fields = json.loads((folder / INDEX_NAME).read_text())
            shards = tuple(Shard(**shard) for shard in fields.pop("shards"))
            index = cls(shards=shards, **fields)
            width = _TYPES[index.dtype].itemsize
            sizes = [(folder / shard.file).stat().st_size for shard in shards]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StageError(
                FailureReason.CORRUPT_ARTIFACT, f"The token shards have no usable {INDEX_NAME}: {error}"
            ) from error
        wrong = [shard.file for shard, size in zip(shards, sizes, strict=True) if size != shard.tokens * width]
        if wrong or sum(shard.tokens for shard in shards) != index.tokens:
            raise StageError(
                FailureReason.CORRUPT_ARTIFACT,
                f"The token shards do not have the sizes that {INDEX_NAME} says: {', '.join(wrong) or 'total'}.",
            )
        return index


@dataclass(frozen=True)
class End:
    """Where a full shard ends in the text.

    Attributes:
        documents: lie as a whole in this shard and those before it, separators included.
        tokens: of the document after them that do too.
    """

    documents: int = 0
    tokens: int = 0


def shard_names(number: int) -> tuple[str, str]:
    """The names of a shard and of what says where it ends."""
    return f"shard-{number:05d}.bin", f"shard-{number:05d}.end.json"


class ShardWriter:
    """Writes documents one after the other. The same documents give the same bytes.

    Args:
        folder: for the shards.
        vocab_size: every id is below this.
        document_separator_id: follows every document.
        full: is called with each full shard and its end, both files; it may take the files away.
        shards: full ones that were written before; the documents go on at `begin`.
        begin: end of the last of these.
    """

    def __init__(
        self,
        folder: Path,
        *,
        vocab_size: int,
        document_separator_id: int,
        full: Callable[[Path, Path], None] | None = None,
        shards: int = 0,
        begin: End = End(),
    ) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._separator = document_separator_id
        self._dtype = type_name(vocab_size)
        self._full = full
        self._shards = [Shard(shard_names(number)[0], SHARD_TOKENS) for number in range(shards)]
        self._file: BinaryIO | None = None
        self._filled = 0
        self._rows = begin.documents
        self._written_of_first = begin.tokens

    @property
    def tokens(self) -> int:
        """Tokens written so far."""
        return sum(shard.tokens for shard in self._shards) + self._filled

    def append(self, documents: Sequence[npt.ArrayLike]) -> None:
        """Writes documents, each followed by the separator.

        Raises:
            OverflowError: an id is none of the vocabulary.
        """
        dtype = _TYPES[self._dtype]
        separator = np.array([self._separator], np.uint32)
        parts = [part for document in documents for part in (np.asarray(document, np.uint32), separator)]
        flat = np.concatenate(parts) if parts else separator[:0]
        if len(flat) and flat.max() >= self._vocab_size:
            raise OverflowError(f"token {flat.max()} is not of a vocabulary of {self._vocab_size}")
        ends = np.cumsum([len(part) for part in parts])[1::2]
        at, self._written_of_first = self._written_of_first, 0
        while at < len(flat):
            if self._file is None:
                self._file = (self._folder / shard_names(len(self._shards))[0]).open("wb")
            part = flat[at : at + SHARD_TOKENS - self._filled]
            self._file.write(part.astype(dtype).tobytes())
            self._filled += len(part)
            at += len(part)
            if self._filled == SHARD_TOKENS:
                whole = int(np.searchsorted(ends, at, side="right"))
                self._close_shard(End(self._rows + whole, at - (int(ends[whole - 1]) if whole else 0)))
        self._rows += len(documents)

    def finish(self) -> ShardIndex:
        """Closes the last shard and writes the index."""
        self._close_shard(None)
        index = ShardIndex(
            dtype=self._dtype,
            vocab_size=self._vocab_size,
            shards=tuple(self._shards),
            tokens=self.tokens,
            rows=self._rows,
            document_separator_id=self._separator,
        )
        index.write(self._folder)
        return index

    def close(self) -> None:
        """Gives a shard up that is not finished; without effect after `finish`."""
        if self._file is not None:
            self._file.close()

    def _close_shard(self, end: End | None) -> None:
        if self._file is None:
            return
        self._file.close()
        self._file = None
        shard, says_where = (self._folder / name for name in shard_names(len(self._shards)))
        self._shards.append(Shard(shard.name, self._filled))
        self._filled = 0
        if end is not None:
            says_where.write_text(json.dumps(asdict(end)) + "\n")
            if self._full is not None:
                self._full(shard, says_where)


def type_name(vocab_size: int) -> str:
    """The type of the ids: as narrow as the vocabulary allows."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def shard_bytes(vocab_size: int) -> int:
    """Size of a full shard."""
    return SHARD_TOKENS * _TYPES[type_name(vocab_size)].itemsize


class TokenStream:
    """The shards of a folder as one stream of ids, mapped and not read.

    Attributes:
        index: what the folder says of itself.
    """

    def __init__(self, folder: Path) -> None:
        self.index = ShardIndex.read(folder)
        dtype = _TYPES[self.index.dtype]
        self._shards = [np.memmap(folder / shard.file, dtype, mode="r") for shard in self.index.shards]
        self._starts = np.cumsum([0, *(shard.tokens for shard in self.index.shards)])

    def __len__(self) -> int:
        return self.index.tokens

    def counts(self, vocab_size: int) -> npt.NDArray[np.int64]:
        """How often each id occurs: [V]. Reads all of it, a part at a time."""
        total = np.zeros(vocab_size, dtype=np.int64)
        for shard in self._shards:
            for start in range(0, len(shard), _COUNTED_AT_ONCE):
                total += np.bincount(shard[start : start + _COUNTED_AT_ONCE], minlength=vocab_size)
        return total

    def read(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Ids at start to start + count, across shards."""
        ids = np.empty(count, dtype=np.int64)
        done = 0
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        while done < count:
            offset = start + done - int(self._starts[shard])
            part = self._shards[shard][offset : offset + count - done]
            ids[done : done + len(part)] = part
            done += len(part)
            shard += 1
        return ids
