"""Which sequences of an optimiser step a process computes, and in how many micro-batches."""

import math
from dataclasses import dataclass

from osprey_api.conditions import FailureReason
from osprey_runtime.errors import StageError

MICRO_BATCH_TOKENS = 8192
"""Most tokens of a micro-batch, unless one sequence is longer: two of the paper's sequences."""


@dataclass(frozen=True)
class Split:
    """A global batch dealt to processes like cards: after sorting by length all get about the same work.

    Attributes:
        global_batch_size: sequences per optimiser step.
        rank: this process.
        world_size: all processes.
        accumulation: micro-batches of one process in a step.
    """

    global_batch_size: int
    rank: int
    world_size: int
    accumulation: int

    @classmethod
    def plan(cls, *, global_batch_size: int, sequence_length: int, rank: int, world_size: int) -> "Split":
        """Micro-batches as large as `MICRO_BATCH_TOKENS` lets them be.

        Raises:
            StageError: INVALID_CONFIG if the processes cannot have equal shares.
        """
        if global_batch_size % world_size:
            raise StageError(
                FailureReason.INVALID_CONFIG,
                f"globalBatchSize is {global_batch_size}, which {world_size} processes cannot share evenly: make it a "
                f"multiple of {world_size}, or train with fewer nodes or GPUs.",
            )
        share = global_batch_size // world_size
        largest = max(1, MICRO_BATCH_TOKENS // sequence_length)
        return cls(global_batch_size, rank, world_size, math.ceil(share / largest))

    def members(self, micro_batch: int) -> slice:
        """Places of this process's sequences in the global batch."""
        share = self.global_batch_size // self.world_size
        first = share * micro_batch // self.accumulation
        last = share * (micro_batch + 1) // self.accumulation
        return slice(self.rank + first * self.world_size, self.rank + last * self.world_size, self.world_size)
