"""How to train, and the learning rate that follows from it."""

import math
from dataclasses import dataclass
from enum import StrEnum


class Schedule(StrEnum):
    """Learning rate after the warm-up."""

    CONSTANT = "constant"
    COSINE = "cosine"


@dataclass(frozen=True)
class LoopSettings:
    """How to train.

    Attributes:
        steps: optimiser steps in all.
        learning_rate: the highest.
        muon_scale: Muon trains the matrices, at so many times the learning rate, which needs ZeRO stage 0; None: AdamW
            trains them as it does all else.
        accumulation: micro-batches of one rank in one step.
        warmup_ratio: share of the steps.
        clip_norm: of the whole gradient, over all ranks.
        ema_decay: of the averaged weights that are the result; None: the last weights are.
        bf16: run matrix products in bfloat16 by autocast; weights stay fp32.
    """

    steps: int
    learning_rate: float
    muon_scale: float | None = None
    accumulation: int = 1
    schedule: Schedule = Schedule.COSINE
    warmup_ratio: float = 0.01
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    clip_norm: float = 1.0
    ema_decay: float | None = None
    zero_stage: int = 1
    bf16: bool = True
    checkpoint_every_steps: int = 500
    seed: int = 0

    def learning_rate_at(self, step: int) -> float:
        """For the update number `step`, counted from 0: linear warm-up, then the schedule."""
        warmup = math.ceil(self.steps * self.warmup_ratio)
        if step < warmup:
            return self.learning_rate * (step + 1) / warmup
        if self.schedule is Schedule.CONSTANT:
            return self.learning_rate
        done = (step - warmup) / max(1, self.steps - warmup)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * done))
