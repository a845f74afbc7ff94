"""Where the target's states come from: computed for every batch, or once and then read from disk."""

import logging
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from osprey_api.conditions import FailureReason
from osprey_runtime.errors import StageError
from osprey_trainer.batch import DialogueBatch
from osprey_trainer.data.answers import Dialogue
from osprey_trainer.data.split import MICRO_BATCH_TOKENS
from osprey_trainer.models.target import Target, TargetStates

log = logging.getLogger(__name__)

_REPORTS = 10


def alike_in_length(dialogues: Sequence[Dialogue]) -> Iterator[list[Dialogue]]:
    """Yields all dialogues in batches of at most `MICRO_BATCH_TOKENS` with padding, unless one alone is longer."""
    batch: list[Dialogue] = []
    for dialogue in sorted(dialogues, key=len):
        if batch and (len(batch) + 1) * len(dialogue) > MICRO_BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(dialogue)
    if batch:
        yield batch


class Teacher(Protocol):
    """Adds the target's states to dialogues."""

    def batch(self, dialogues: Sequence[Dialogue]) -> DialogueBatch:
        """Returns the dialogues as one micro-batch."""


class OnlineTeacher:
    """Runs the target on every batch.

    Args:
        greedy: the answers are greedy, so the target's most likely token is the next one; otherwise it is
            computed.
    """

    def __init__(self, target: Target, *, greedy: bool, device: torch.device) -> None:
        self._target = target
        self._greedy = greedy
        self._device = device

    def batch(self, dialogues: Sequence[Dialogue]) -> DialogueBatch:
        """Returns the dialogues as one micro-batch, on the target's device."""
        ids = pad_sequence([dialogue.ids for dialogue in dialogues], batch_first=True).to(self._device)
        states = self._target.states(ids)
        return DialogueBatch(
            ids=ids,
            lengths=torch.tensor([len(dialogue) for dialogue in dialogues]),
            answer=pad_sequence([dialogue.answer_mask for dialogue in dialogues], batch_first=True),
            states=states,
            greedy=None if self._greedy else self._target.greedy_tokens(states.last_hidden),
            names=tuple(dialogue.name for dialogue in dialogues),
        ).to(self._device)


class CapturedTeacher:
    """Reads states that the target computed once, memory-mapped.

    The files of the folder are `taps.bin` [N, 3·Ht], `last_hidden.bin` [N, Ht] and, unless the answers are greedy,
    `greedy.bin` int64 [N], where N counts the tokens of all dialogues in their order.
    """

    def __init__(
        self, folder: Path, dialogues: Sequence[Dialogue], *, taps: int, hidden: int, dtype: torch.dtype, greedy: bool
    ) -> None:
        """taps: 3·Ht; hidden: Ht."""
        lengths = [len(dialogue) for dialogue in dialogues]
        tokens = sum(lengths)
        self._taps = _mapped(folder / "taps.bin", (tokens, taps), dtype)
        self._last_hidden = _mapped(folder / "last_hidden.bin", (tokens, hidden), dtype)
        self._greedy = None if greedy else _mapped(folder / "greedy.bin", (tokens,), torch.int64)
        ends = torch.tensor(lengths).cumsum(0).tolist()
        self._rows = {
            dialogue.name: slice(end - length, end)
            for dialogue, length, end in zip(dialogues, lengths, ends, strict=True)
        }

    def batch(self, dialogues: Sequence[Dialogue]) -> DialogueBatch:
        """Returns the dialogues as one micro-batch, on the CPU."""
        places = [self._rows[dialogue.name] for dialogue in dialogues]
        return DialogueBatch.collate(
            ids=[dialogue.ids for dialogue in dialogues],
            answer=[dialogue.answer_mask for dialogue in dialogues],
            states=[TargetStates(self._taps[place], self._last_hidden[place]) for place in places],
            names=[dialogue.name for dialogue in dialogues],
            greedy=None if self._greedy is None else [self._greedy[place] for place in places],
        )

    def fill(self, dialogue: Dialogue, states: TargetStates, greedy: Tensor | None, *, row: int) -> None:
        """Keeps what the target computed for a dialogue, which is one row of a batch: [B, T, ...], T >= its length."""
        place, length = self._rows[dialogue.name], len(dialogue)
        self._taps[place] = states.taps[row, :length].to("cpu", self._taps.dtype)
        self._last_hidden[place] = states.last_hidden[row, :length].to("cpu", self._last_hidden.dtype)
        if self._greedy is not None and greedy is not None:
            self._greedy[place] = greedy[row, :length].cpu()


def _mapped(path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.from_file(str(path), shared=True, size=math.prod(shape), dtype=dtype).view(shape)


def capture(
    folder: Path,
    dialogues: Sequence[Dialogue],
    target: Target,
    *,
    greedy: bool,
    dtype: torch.dtype,
    device: torch.device,
    local_rank: int,
    local_world_size: int,
    barrier: Callable[[], object],
    check_stopped: Callable[[], None],
) -> CapturedTeacher:
    """Computes the states of all dialogues into a folder that the processes of one machine share.

    What the folder holds after an earlier capture that ended is used as it is: give every set of dialogues,
    target and dtype a folder of its own. Batches do not depend on the number of processes, so neither do the states.

    Args:
        barrier: returns when all processes have called it.
        check_stopped: raises when the stage must stop.

    Raises:
        StageError: OUT_OF_DISK if the states do not fit.
    """
    complete = folder / "complete"
    found = complete.exists()
    barrier()
    hidden = target.head.weight.shape[1]
    if not found and local_rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        _check_disk(folder, dialogues, bytes_per_token=(len(target.tapped_layers) + 1) * hidden * dtype.itemsize)
    barrier()
    teacher = CapturedTeacher(
        folder, dialogues, taps=len(target.tapped_layers) * hidden, hidden=hidden, dtype=dtype, greedy=greedy
    )
    if not found:
        batches = list(alike_in_length(dialogues))
        mine = batches[local_rank::local_world_size]
        for number, members in enumerate(mine):
            check_stopped()
            if number % max(1, len(mine) // _REPORTS) == 0:
                log.info("capturing the target's states: batch %d of %d", number, len(mine))
            ids = pad_sequence([dialogue.ids for dialogue in members], batch_first=True).to(device)
            states = target.states(ids)
            tokens = None if greedy else target.greedy_tokens(states.last_hidden)
            for row, dialogue in enumerate(members):
                teacher.fill(dialogue, states, tokens, row=row)
    barrier()
    if local_rank == 0:
        complete.touch()
    return teacher


def _check_disk(folder: Path, dialogues: Sequence[Dialogue], *, bytes_per_token: int) -> None:
    needed = sum(map(len, dialogues)) * bytes_per_token
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise StageError(
            FailureReason.OUT_OF_DISK,
            f"The target's captured states need {needed / 2**30:.1f} GiB, but the scratch volume has "
            f"{free / 2**30:.1f} GiB left: set distillation.teacher.mode to Online, or give a larger scratch volume.",
        )
