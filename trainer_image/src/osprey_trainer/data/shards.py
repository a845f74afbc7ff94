"""Token shards: text as memory-mapped token ids. Several files, one stream.

A folder holds `shard-00000.bin`, `shard-00001.bin` and so on, little-endian ids without a header, and `index.json`.
Shards are cut at a fixed number of tokens, wherever that falls: a document may go on in the next file.
"""

import json
from collections.abc import Sequence
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


class ShardWriter:
    """Writes documents one after the other. The same documents give the same bytes."""

    def __init__(
        self, folder: Path, *, vocab_size: int, document_separator_id: int, shard_tokens: int = SHARD_TOKENS
    ) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._separator = document_separator_id
        self._shard_tokens = shard_tokens
        self._dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
        self._shards: list[Shard] = []
        self._file: BinaryIO | None = None
        self._filled = 0
        self._rows = 0

    @property
    def tokens(self) -> int:
        """Tokens written so far."""
        return sum(shard.tokens for shard in self._shards) + self._filled

    def append(self, documents: Sequence[Sequence[int]]) -> None:
        """Writes documents, each followed by the separator."""
        flat = np.fromiter(
            (index for document in documents for index in (*document, self._separator)),
            dtype=_TYPES[self._dtype],
        )
        self._rows += len(documents)
        while len(flat):
            if self._file is None:
                self._file = self._path(len(self._shards)).open("wb")
            part, flat = np.split(flat, [self._shard_tokens - self._filled])
            self._file.write(part.tobytes())
            self._filled += len(part)
            if self._filled == self._shard_tokens:
                self._close_shard()

    def finish(self) -> ShardIndex:
        """Closes the last shard and writes the index."""
        self._close_shard()
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

    def _path(self, number: int) -> Path:
        return self._folder / f"shard-{number:05d}.bin"

    def _close_shard(self) -> None:
        if self._file is None:
            return
        self._file.close()
        self._file = None
        self._shards.append(Shard(self._path(len(self._shards)).name, self._filled))
        self._filled = 0


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
