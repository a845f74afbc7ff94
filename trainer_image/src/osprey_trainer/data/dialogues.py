"""Batches of dialogues for Stage 4: shuffled by epoch, alike in length within a batch."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from osprey_trainer.batch import DialogueBatch
from osprey_trainer.data.answers import Dialogue
from osprey_trainer.data.split import Split
from osprey_trainer.data.teacher import Teacher

BATCHES_PER_CHUNK = 8
"""Batches sorted by length together: enough that padding is small, few enough that the order stays random."""


class DialogueBatches:
    """An endless source of dialogues with the target's states.

    The dialogues of all epochs are one stream of shuffled passes. A chunk of it is sorted by length, cut into
    batches, and the batches are shuffled. All of it is a function of the seed and the step: the same however
    many processes share the batches, and the step is all there is to save.
    """

    def __init__(self, dialogues: Sequence[Dialogue], teacher: Teacher, *, split: Split, seed: int) -> None:
        self._dialogues = dialogues
        self._lengths = np.array([len(dialogue) for dialogue in dialogues])
        self._teacher = teacher
        self._split = split
        self._seed = seed
        self._served = 0
        # A chunk longer than an epoch would put copies of one dialogue side by side.
        self._chunk_batches = max(1, min(BATCHES_PER_CHUNK, len(dialogues) // split.global_batch_size))
        self._chunk: tuple[int, npt.NDArray[np.int64]] | None = None

    def __next__(self) -> DialogueBatch:
        batch = self._teacher.batch(self._micro_batch(self._served))
        self._served += 1
        self._teacher.prepare(self._micro_batch(self._served))
        return batch

    def _micro_batch(self, number: int) -> list[Dialogue]:
        step, micro_batch = divmod(number, self._split.accumulation)
        return [self._dialogues[index] for index in self.members(step)[self._split.members(micro_batch)]]

    def members(self, step: int) -> npt.NDArray[np.int64]:
        """Indices of the dialogues of a step, the shortest first: [global batch size]."""
        chunk, position = divmod(step, self._chunk_batches)
        if self._chunk is None or self._chunk[0] != chunk:
            self._chunk = (chunk, self._arrange(chunk))
        members: npt.NDArray[np.int64] = self._chunk[1][position]
        return members

    def state_dict(self) -> dict[str, Any]:
        """The optimiser steps served."""
        return {"step": self._served // self._split.accumulation}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues after the steps of `state`."""
        self._served = state["step"] * self._split.accumulation

    def _arrange(self, chunk: int) -> npt.NDArray[np.int64]:
        """[batches, global batch size]."""
        size = self._chunk_batches * self._split.global_batch_size
        epoch, start = divmod(chunk * size, len(self._dialogues))
        drawn = self._epoch(epoch)[start:]
        while len(drawn) < size:
            epoch += 1
            drawn = np.concatenate([drawn, self._epoch(epoch)])
        drawn = drawn[:size]
        ordered = drawn[np.argsort(self._lengths[drawn], kind="stable")]
        batches = ordered.reshape(self._chunk_batches, -1)
        return np.random.default_rng([self._seed, 1, chunk]).permutation(batches, axis=0)

    def _epoch(self, epoch: int) -> npt.NDArray[np.int64]:
        return np.random.default_rng([self._seed, 0, epoch]).permutation(len(self._dialogues))
