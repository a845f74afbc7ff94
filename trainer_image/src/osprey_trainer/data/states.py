"""The target's states of all dialogues as an artifact, which is read a dialogue at a time where it lies.

index.json                 what all of it has in common
head.safetensors           the target's head: with it, whoever learns from the states needs no target
states-00000.bin, …        shards: the blocks of some dialogues one after the other, and the list of them

The list, JSON, has name, length in tokens and CRC-32 of each block; behind it, at the end of the file, are its own
CRC-32 and its length in bytes. It lies in the same file, so that blocks and checksums are always of the same attempt.

A block is one dialogue: a row of [taps · Ht + Ht] for each token, and behind these, unless the answers are greedy, the
target's most likely next token of each as int32. All numbers are little-endian.
"""

import dataclasses
import json
import struct
import zlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from osprey_api.conditions import FailureReason
from osprey_runtime.errors import StageError
from osprey_runtime.manifest import File, RemoteArtifact
from osprey_runtime.patience import Patience, at_once
from osprey_trainer.batch import DialogueBatch
from osprey_trainer.data.answers import Dialogue
from osprey_trainer.models.target import TargetStates
from osprey_trainer.teacher_head import TeacherHead

INDEX, HEAD = "index.json", "head.safetensors"
_STREAMS = 8
"""Blocks, or lists, that are read at a time."""
_TAIL = struct.Struct("<II")
"""CRC-32 and length of the list."""


@dataclass(frozen=True)
class StatesIndex:
    """What all shards have in common.

    Attributes:
        dtype: of the states and the head, by torch's name.
        hidden_size: Ht.
        tapped_layers: "input to layer j" convention.
        greedy: the answers are, so that the most likely tokens are the next ones.
        shards: how many there are.
        head_scale, head_cap: see `TeacherHead`.
    """

    dtype: str
    hidden_size: int
    tapped_layers: tuple[int, ...]
    greedy: bool
    shards: int = 0
    head_scale: float = 1.0
    head_cap: float | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def width(self) -> int:
        """Numbers of a row."""
        return (len(self.tapped_layers) + 1) * self.hidden_size

    @property
    def token_bytes(self) -> int:
        """Of a token."""
        return self.width * self.torch_dtype.itemsize + (0 if self.greedy else np.dtype(np.int32).itemsize)

    def write(self, folder: Path, head: TeacherHead, *, shards: int) -> None:
        """Writes `index.json` and the head."""
        complete = dataclasses.replace(self, shards=shards, head_scale=head.scale, head_cap=head.cap)
        (folder / INDEX).write_text(json.dumps(asdict(complete), indent=2) + "\n")
        save_file({"weight": head.weight.detach().to("cpu", self.torch_dtype).contiguous()}, folder / HEAD)

    @classmethod
    def read(cls, path: Path) -> "StatesIndex":
        """Reads what `write` wrote."""
        fields = json.loads(path.read_text())
        return cls(**fields | {"tapped_layers": tuple(fields["tapped_layers"])})


def shards_of(dialogues: Sequence[Dialogue], token_bytes: int, *, shard_bytes: int) -> list[list[Dialogue]]:
    """Deals dialogues, in their order, to shards of about `shard_bytes`; the same for any number of processes."""
    shards: list[list[Dialogue]] = []
    size = shard_bytes
    for dialogue in dialogues:
        if size >= shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(dialogue)
        size += len(dialogue) * token_bytes
    return shards


def shard_name(number: int) -> str:
    """Returns the path of a shard within the artifact."""
    return f"states-{number:05d}.bin"


class ShardWriter:
    """Fills a shard, its dialogues in any order."""

    def __init__(self, path: Path, dialogues: Sequence[Dialogue], index: StatesIndex) -> None:
        self._path = path
        self._index = index
        self._dialogues = dialogues
        lengths = [len(dialogue) * index.token_bytes for dialogue in dialogues]
        starts = np.concatenate([[0], np.cumsum(lengths)])
        self._places = {d.name: int(start) for d, start in zip(dialogues, starts, strict=False)}
        self._checksums: dict[str, int] = {}
        self._file: npt.NDArray[np.uint8] | None = np.memmap(path, np.uint8, mode="w+", shape=(int(starts[-1]),))

    def put(self, dialogue: Dialogue, states: TargetStates, greedy: Tensor | None) -> None:
        """Writes a dialogue's block.

        Args:
            dialogue: one of the shard.
            states: taps [T, taps · Ht] and last hidden states [T, Ht], T at least its length.
            greedy: int64 [T], the target's most likely next tokens; None where the answers are greedy.
        """
        length = len(dialogue)
        rows = torch.cat([states.taps[:length], states.last_hidden[:length]], dim=-1)
        block = rows.to("cpu", self._index.torch_dtype).contiguous().view(torch.uint8).numpy().tobytes()
        if greedy is not None:
            block += greedy[:length].to("cpu", torch.int32).numpy().tobytes()
        start = self._places[dialogue.name]
        if self._file is None:
            raise ValueError("the shard is finished")
        self._file[start : start + len(block)] = np.frombuffer(block, np.uint8)
        self._checksums[dialogue.name] = zlib.crc32(block)

    def finish(self) -> None:
        """Writes the list of blocks, and lets go of the file."""
        self._file = None  # a mapping would keep its room on the disk beyond the file's deletion
        entries = json.dumps([[d.name, len(d), self._checksums[d.name]] for d in self._dialogues]).encode()
        with self._path.open("ab") as file:
            file.write(entries + _TAIL.pack(zlib.crc32(entries), len(entries)))


@dataclass(frozen=True)
class _Block:
    """Where the states of a dialogue lie."""

    file: File
    start: int
    tokens: int
    checksum: int


class StreamedTeacher:
    """A teacher that reads captured states from where they lie, those of the next batch while this one is trained on.

    Attributes:
        index: what all states have in common.
        head: the target's.
    """

    def __init__(
        self,
        remote: RemoteArtifact,
        dialogues: Sequence[Dialogue],
        scratch: Path,
        patiently: Patience = at_once,
    ) -> None:
        """Reads the lists of blocks.

        Args:
            remote: the artifact.
            dialogues: all that will be asked for.
            scratch: folder for the small files.
            patiently: asks the storage.

        Raises:
            StageError: INVALID_CONFIG if the states are of other dialogues; CORRUPT_ARTIFACT; or the storage can't be
                used.
        """
        self._remote = remote
        self._patiently = patiently
        self.index = StatesIndex.read(self._fetched(INDEX, scratch))
        self.head = TeacherHead(
            load_file(self._fetched(HEAD, scratch))["weight"], self.index.head_scale, self.index.head_cap
        )
        self._pool = ThreadPoolExecutor(_STREAMS, thread_name_prefix="states")
        lists = self._pool.map(self._list, range(self.index.shards))
        self._blocks = {name: block for entries in lists for name, block in entries}
        for dialogue in dialogues:
            block = self._blocks.get(dialogue.name)
            if block is None or block.tokens != len(dialogue):
                raise StageError(
                    FailureReason.INVALID_CONFIG,
                    f"The captured states are not of these answers: of {dialogue.name} they hold "
                    f"{block.tokens if block else 'no'} tokens, and it has {len(dialogue)}; capture them anew.",
                )
        self._begun: dict[str, Future[bytes]] = {}

    def prepare(self, dialogues: Sequence[Dialogue]) -> None:
        """Begins to read what `batch` will be asked for next."""
        for dialogue in dialogues:
            if dialogue.name not in self._begun:
                self._begun[dialogue.name] = self._pool.submit(self._read, self._blocks[dialogue.name])

    def batch(self, dialogues: Sequence[Dialogue]) -> DialogueBatch:
        """Returns the dialogues as one micro-batch, on the CPU."""
        self.prepare(dialogues)
        blocks = [self._begun[dialogue.name].result() for dialogue in dialogues]
        for dialogue in dialogues:
            self._begun.pop(dialogue.name, None)  # where two epochs meet a batch may hold a dialogue twice
        states, greedy = zip(*(self._parsed(block) for block in blocks), strict=True)
        return DialogueBatch.collate(
            ids=[dialogue.ids for dialogue in dialogues],
            answer=[dialogue.answer_mask for dialogue in dialogues],
            states=states,
            names=[dialogue.name for dialogue in dialogues],
            greedy=None if self.index.greedy else greedy,
        )

    def _read(self, block: _Block) -> bytes:
        return self._checked(block.file, block.start, block.tokens * self.index.token_bytes, block.checksum)

    def _checked(self, file: File, start: int, length: int, checksum: int) -> bytes:
        for _ in range(2):  # once more, since the wire may be at fault and not the file
            data = self._patiently(lambda: self._remote.read(file, start, length))
            if zlib.crc32(data) == checksum:
                return data
        raise self._remote.doubted(file)

    def _parsed(self, block: bytes) -> tuple[TargetStates, Tensor | None]:
        index = self.index
        tokens = len(block) // index.token_bytes
        buffer = bytearray(block)  # torch wants memory that may be written
        rows = torch.frombuffer(buffer, dtype=index.torch_dtype, count=tokens * index.width).view(tokens, index.width)
        taps, last_hidden = rows[:, : -index.hidden_size], rows[:, -index.hidden_size :]
        greedy = None
        if not index.greedy:
            offset = rows.numel() * rows.element_size()
            greedy = torch.frombuffer(buffer, dtype=torch.int32, count=tokens, offset=offset).long()
        return TargetStates(taps, last_hidden), greedy

    def _list(self, number: int) -> list[tuple[str, _Block]]:
        file = self._remote.file(shard_name(number))
        tail = self._patiently(lambda: self._remote.read(file, max(0, file.size - _TAIL.size), _TAIL.size))
        if len(tail) != _TAIL.size:
            raise self._remote.doubted(file)
        checksum, length = _TAIL.unpack(tail)
        end = file.size - _TAIL.size - length
        if end < 0:
            raise self._remote.doubted(file)
        entries: list[Any] = json.loads(self._checked(file, end, length, checksum))
        found, start = [], 0
        for name, tokens, of_block in entries:
            found.append((name, _Block(file, start, tokens, of_block)))
            start += tokens * self.index.token_bytes
        return found

    def _fetched(self, path: str, scratch: Path) -> Path:
        local = scratch / path
        self._patiently(lambda: self._remote.download(self._remote.file(path), local))
        return local
