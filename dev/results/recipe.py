"""How large everything is, and how it is trained: the demonstration's recipe with the paper's unroll."""

from dataclasses import dataclass

from dev.results.specs import Drafter, Target
from osprey_api.stages import HeldOut, Optimization


@dataclass(frozen=True)
class Recipe:
    """Sizes. Another one makes other artifacts beside those of this one.

    Attributes:
        samples: training prompts of a domain.
        held_out: evaluation prompts of a domain.
        answer_tokens: most tokens of an answer.
        sequence_length: of distillation, tokens.
        batch: dialogues per step of distillation.
        unroll: steps of the unroll.
        learning_rate: of distillation, before an experiment divides it.
        stage2_batch: windows per step of Stage 2.
        stage2_window: tokens.
        served: evaluation prompts that servers are asked, the first of the held-out ones.
        served_tokens: most tokens of an answer there.
        stage2_scale: Stage 2's steps are multiplied by it.
    """

    samples: int = 128
    held_out: int = 24
    answer_tokens: int = 96
    sequence_length: int = 256
    batch: int = 4
    unroll: int = 5
    learning_rate: float = 1e-3
    stage2_batch: int = 8
    stage2_window: int = 128
    served: int = 16
    served_tokens: int = 64
    stage2_scale: float = 1.0

    def samples_of(self, target: Target) -> int:
        """Return a domain's training prompts."""
        return round(self.samples * target.share)

    def held_out_of(self, target: Target) -> HeldOut:
        """Return what is kept for evaluation."""
        return HeldOut(samples=round(self.held_out * target.share), seed=0)

    def stage2_steps(self, steps: int) -> int:
        """Return the steps that a backbone's name stands for."""
        return max(1, round(steps * self.stage2_scale)) if steps else 0

    @property
    def pretraining(self) -> Optimization:
        """Of Stage 2."""
        return self._optimization(1e-3, batch=self.stage2_batch, length=self.stage2_window, seed=0)

    def distillation(self, drafter: Drafter) -> Optimization:
        """Of Stage 4."""
        return self._optimization(
            self.learning_rate / drafter.slower, batch=self.batch, length=self.sequence_length, seed=drafter.seed
        )

    @staticmethod
    def _optimization(rate: float, *, batch: int, length: int, seed: int) -> Optimization:
        return Optimization(
            learning_rate=rate, schedule="Constant", warmup_ratio=0.04, weight_decay=0.0, clip_norm=1.0, ema_decay=0.98,
            global_batch_size=batch, sequence_length=length, precision="FP32", seed=seed,
        )  # fmt: skip


WHOLE = Recipe()
"""The one whose figures are published."""
TRIAL = Recipe(
    samples=16,
    held_out=4,
    answer_tokens=24,
    sequence_length=128,
    stage2_scale=0.02,
    served=4,
    served_tokens=16,
)
"""To see in minutes that every kind of cell works; its figures mean nothing."""
