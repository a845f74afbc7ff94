"""Our step beside SpecForge's: the same inputs, interleaved, with their losses and gradients compared."""

import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from dev.bench import measure
from dev.bench.inputs import Case, Kind, prepare
from dev.bench.measure import Spread
from dev.bench.worker import Task

CASES = [
    Case(vocabulary, draft_vocabulary or vocabulary, batch)
    for vocabulary, draft_vocabulary, batch in product((49_152, 151_936), (32_000, 0), Kind)
]
"""0: the full vocabulary."""
WORKER = "dev.bench.worker"
TOLERANCE = 1e-5
SIDES = ("osprey", "specforge")


@dataclass(frozen=True)
class Side:
    """One side of a row.

    Attributes:
        seconds: of a step.
        cpu_seconds: that its threads computed.
        tokens_per_second: of the batch, its padding not counted.
        peak_mib: memory of a step above what there was before.
        tflop: of a step, counted.
        mfu: of a step, against the peak that the machine had then.
    """

    seconds: Spread
    cpu_seconds: Spread
    tokens_per_second: Spread
    peak_mib: Spread
    tflop: float
    mfu: float

    @classmethod
    def of(cls, runs: Sequence[Mapping[str, Any]], tokens: int) -> "Side":
        """Of several processes."""
        seconds = [value for run in runs for value in run["seconds"]]
        flops = runs[0]["facts"]["flops"]
        return cls(
            Spread.of(seconds),
            Spread.of([value for run in runs for value in run["cpu_seconds"]]),
            Spread.of([tokens / value for value in seconds]),
            Spread.of([run["peak_bytes"] / 2**20 for run in runs]),
            flops / 1e12,
            flops / statistics.median(seconds) / runs[0]["facts"]["gemm_peak"],
        )


@dataclass(frozen=True)
class Row:
    """A case of both sides.

    Attributes:
        batch: "demo" or "all".
        speed_ratio: our tokens per second by SpecForge's.
        memory_ratio: our peak memory by SpecForge's.
        loss_difference: relative, of the weighted sum.
        gradient_difference: of the tensor that differs most: norm of the difference by norm.
        facts: of the batch: dialogues, tokens, answer_tokens, rows by step.
        specforge_commit: of the checkout, with `-dirty` where it was changed; "": unknown.
    """

    vocabulary: int
    draft_vocabulary: int
    batch: str
    speed_ratio: float
    memory_ratio: float
    loss_difference: float
    gradient_difference: float
    osprey: Side
    specforge: Side
    facts: Mapping[str, Any]
    specforge_commit: str = ""


def compare(
    checkout: Path, *, repeats: int, cases: Sequence[Case] = tuple(CASES), options: Mapping[str, Any] | None = None
) -> Iterator[Row]:
    """Measure all cases, and yield each as it is there.

    Args:
        checkout: of SpecForge.
        repeats: processes of each side.
        cases: to measure.
        options: of SpecForge: `eager`, `compact_teacher`, see `Task`. The second needs a draft vocabulary.

    Raises:
        SystemExit: losses or gradients differ by more than `TOLERANCE`, so that the figures would mean nothing.
    """
    prepare(cases)
    commit = _commit(checkout)
    for case in cases:
        row = _compare(repeats, Task(case, specforge=str(checkout), **(options or {})))
        yield replace(row, specforge_commit=commit)


def _commit(checkout: Path) -> str:
    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(checkout), *words], check=False, capture_output=True, text=True)
        return done.stdout.strip()

    # Git looks upwards, where an unpacked archive may lie in another repository.
    if git("rev-parse", "--show-toplevel") != str(checkout):
        return ""
    return git("describe", "--always", "--dirty", "--abbrev=12", "--exclude", "*")


def _compare(repeats: int, theirs: Task) -> Row:
    case = theirs.case
    with tempfile.TemporaryDirectory() as folder:
        files = {side: str(Path(folder) / f"{side}.safetensors") for side in SIDES}
        tasks = {"osprey": Task(case), "specforge": theirs}
        runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
        for repeat in range(repeats):
            for side in SIDES if repeat % 2 == 0 else reversed(SIDES):
                task = tasks[side] if repeat else replace(tasks[side], gradients=files[side], counts=True)
                runs[side].append(measure.in_process(WORKER, asdict(task)))
        row = summarise(case, runs, gradient_difference(Path(files["osprey"]), Path(files["specforge"])))
    if not (row.loss_difference <= TOLERANCE and row.gradient_difference <= TOLERANCE):  # nor where one is no number
        raise SystemExit(
            f"the two sides do not compute the same: losses differ by {row.loss_difference:.1e}, gradients by "
            f"{row.gradient_difference:.1e} in {case}"
        )
    return row


def summarise(case: Case, runs: Mapping[str, Sequence[Mapping[str, Any]]], difference: float) -> Row:
    """Return the row of a case.

    Args:
        case: that was measured.
        runs: what the processes of each side said.
        difference: of the gradients.
    """
    facts = runs["osprey"][0]["facts"]
    sides = {side: Side.of(runs[side], facts["tokens"]) for side in SIDES}
    ours, theirs = sides["osprey"], sides["specforge"]
    losses = {side: sum(runs[side][0]["losses"]) for side in SIDES}
    return Row(
        vocabulary=case.vocabulary,
        draft_vocabulary=case.draft_vocabulary,
        batch=str(case.batch),
        speed_ratio=theirs.seconds.median / ours.seconds.median,
        memory_ratio=ours.peak_mib.median / theirs.peak_mib.median,
        loss_difference=abs(losses["osprey"] / losses["specforge"] - 1),
        gradient_difference=difference,
        osprey=ours,
        specforge=theirs,
        facts=facts,
    )


def gradient_difference(ours: Path, theirs: Path) -> float:
    """Return how much the tensor that differs most differs: norm of the difference by norm.

    Raises:
        SystemExit: the two do not train the same tensors.
    """
    left, right = load_file(ours), load_file(theirs)
    if left.keys() != right.keys():
        raise SystemExit(f"the two sides train different tensors: {sorted(left.keys() ^ right.keys())}")
    # A tensor's maximum is no number where one of them is none.
    return float(torch.stack([torch.dist(left[name], right[name]) / right[name].norm() for name in left]).max())
