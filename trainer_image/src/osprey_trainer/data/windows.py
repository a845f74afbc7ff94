"""Random windows over a stream of tokens, for Stage 2."""

from typing import Any

import numpy as np
import torch

from osprey_api.conditions import FailureReason
from osprey_runtime.errors import StageError
from osprey_trainer.batch import WindowBatch
from osprey_trainer.data.shards import TokenStream
from osprey_trainer.data.split import Split


class RandomWindows:
    """An endless source of windows of T + 1 tokens, at random places of the stream.

    The windows of a step are a function of the seed and the step alone: they are the same however many
    processes share them, and the step is all there is to save.
    """

    def __init__(self, stream: TokenStream, *, sequence_length: int, split: Split, seed: int) -> None:
        """sequence_length: T, predicted tokens of a window.

        Raises:
            StageError: INVALID_DATA if the text is shorter than one window.
        """
        self._stream = stream
        self._window = sequence_length + 1
        self._split = split
        self._seed = seed
        self._served = 0
        if len(stream) < self._window:
            raise StageError(
                FailureReason.INVALID_DATA,
                f"The text has {len(stream)} tokens, fewer than one window of {self._window}: give more text, or a "
                "smaller pretraining.sequenceLength.",
            )

    def __next__(self) -> WindowBatch:
        step, micro_batch = divmod(self._served, self._split.accumulation)
        self._served += 1
        random = np.random.default_rng([self._seed, step])
        starts = random.integers(len(self._stream) - self._window + 1, size=self._split.global_batch_size)
        mine = starts[self._split.members(micro_batch)]
        ids = np.stack([self._stream.read(int(start), self._window) for start in mine])
        return WindowBatch(torch.from_numpy(ids), names=tuple(f"window at token {start}" for start in mine))

    def state_dict(self) -> dict[str, Any]:
        """The optimiser steps served."""
        return {"step": self._served // self._split.accumulation}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues after the steps of `state`."""
        self._served = state["step"] * self._split.accumulation
