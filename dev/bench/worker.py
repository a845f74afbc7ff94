"""One process of a measurement: `python -m dev.bench.worker TASK`, with a `Task` as JSON."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from safetensors.torch import save_file
from torch import Tensor

from dev.bench import measure
from dev.bench.inputs import Case, Inputs, Kind
from dev.bench.measure import Measurement
from dev.bench.specforge import DECAY, SpecForge
from osprey_trainer.cost import FlopCount, gemm_peak
from osprey_trainer.losses.divergence import Divergence
from osprey_trainer.models.hf_names import to_published
from osprey_trainer.objectives import Distillation


@dataclass(frozen=True)
class Task:
    """What to measure.

    Attributes:
        case: the step.
        specforge: folder of its checkout; "": our own step.
        compact_teacher: SpecForge's option.
        eager: SpecForge does not compile what it marks for that.
        repeats: steps that are measured, after one that is not.
        counts: FLOPs, of a step more whose loss and gradients are kept, and measure the machine's peak.
        gradients: file for the gradients of the last step; "": none.
    """

    case: Case
    specforge: str = ""
    compact_teacher: bool = False
    eager: bool = False
    repeats: int = 1
    counts: bool = False
    gradients: str = ""

    @classmethod
    def read(cls, text: str) -> Self:
        """Read JSON of `asdict`."""
        fields: dict[str, Any] = json.loads(text)
        case = fields.pop("case")
        return cls(Case(**{**case, "batch": Kind(case["batch"])}), **fields)


class Side(Protocol):
    """A training step: forward and backward of the unroll."""

    def step(self) -> list[float]:
        """Return the losses of the unroll's steps, weighted as they are added."""

    def gradients(self) -> dict[str, Tensor]:
        """By published names."""

    def free(self) -> None:
        """Drop the gradients."""


class Osprey:
    """Our own step: distillation's objective."""

    def __init__(self, case: Case, inputs: Inputs) -> None:
        """Every loss is a sum over rows, divided by the positions of the padded batch, as SpecForge has it."""
        self._inputs = inputs
        self._positions = len(inputs.samples) * max(len(sample.ids) for sample in inputs.samples)
        self._steps = case.steps
        self._objective = Distillation(
            inputs.drafter,
            inputs.head,
            step_weights=[DECAY**k for k in range(case.steps)],
            divergence=Divergence(),
            train_embedding=False,  # EAGLE-3 keeps its target's
        )

    def step(self) -> list[float]:
        """Return the loss, of all steps of the unroll together."""
        self.free()
        loss, _ = self._objective(self._inputs.batch(), torch.full((self._steps,), 1 / self._positions))
        loss.backward()
        return [float(loss.detach())]

    def gradients(self) -> dict[str, Tensor]:
        """By published names."""
        drafter = self._inputs.drafter
        found = {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}
        return to_published(found, num_layers=drafter.config.body.num_layers)

    def free(self) -> None:
        """Drop the gradients."""
        self._inputs.drafter.zero_grad(set_to_none=True)

    def rows(self) -> list[int]:
        """Rows with a loss at each step."""
        return [int(count) for count in self._objective.rows(self._inputs.batch())]


def run(task: Task) -> Measurement:
    """Measure."""
    inputs = Inputs.load(task.case)
    facts: dict[str, Any] = {}
    side: Side
    if task.specforge:
        side = SpecForge(
            Path(task.specforge),
            task.case,
            inputs,
            compact_teacher=task.compact_teacher,
            eager=task.eager,
        )
    else:
        side = own = Osprey(task.case, inputs)
        facts = {
            "dialogues": len(inputs.samples),
            "tokens": sum(len(sample.ids) for sample in inputs.samples),
            "answer_tokens": sum(int(sample.answer.sum()) for sample in inputs.samples),
            "rows": own.rows(),
        }
    losses = side.step()  # what is compiled is compiled here
    seconds: list[float] = []
    computed: list[float] = []

    def timed() -> None:
        for found, more in zip((seconds, computed), measure.seconds(side.step, task.repeats), strict=True):
            found.extend(more)

    side.free()  # a step's gradients are memory of the step
    peak = measure.peak_bytes(timed)
    if task.counts:
        # Products in code that was compiled would not be seen; and with it losses differed by 2e-6 to 1.1e-5, without
        # it by 3e-7 in the case that was tried.
        with torch._dynamo.config.patch(disable=True), FlopCount() as count:  # noqa: SLF001
            losses = side.step()
        facts |= {"flops": count.flops, "gemm_peak": gemm_peak(torch.device("cpu"), torch.float32)}
    if task.gradients:
        save_file({name: gradient.contiguous() for name, gradient in side.gradients().items()}, task.gradients)
    return Measurement(seconds, computed, peak, losses, facts)


if __name__ == "__main__":
    print(measure.answer(run(Task.read(sys.argv[1]))))
