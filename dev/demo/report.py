"""What the demonstration found, as a table for people and as JSON for machines."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from osprey_api.stages import EvaluateResult

BOOTSTRAP_SAMPLES = 10_000


@dataclass(frozen=True)
class Request:
    """One held-out prompt as a drafter's evaluation served it."""

    domain: str
    prompt_ids: tuple[int, ...]
    completion_tokens: int
    verify_steps: int

    @property
    def acceptance_length(self) -> float:
        """Tokens gained per verification."""
        return self.completion_tokens / self.verify_steps


@dataclass(frozen=True)
class Ratio:
    """A ratio of mean acceptance lengths with the 95 % interval of a paired bootstrap over prompts."""

    value: float
    low: float
    high: float
    prompts: int


def acceptance_ratio(ours: Sequence[Request], theirs: Sequence[Request], *, seed: int = 0) -> Ratio:
    """Compare two drafters on the same prompts: mean per-request acceptance length of the first over the second's.

    A prompt on which either made no verify step says nothing of acceptance and is left out of both.

    Raises:
        ValueError: the drafters were not asked the same prompts in the same order.
    """
    if [request.prompt_ids for request in ours] != [request.prompt_ids for request in theirs]:
        raise ValueError("the two evaluations asked different prompts: their acceptance lengths cannot be compared")
    pairs = [
        (a.acceptance_length, b.acceptance_length)
        for a, b in zip(ours, theirs, strict=True)
        if a.verify_steps and b.verify_steps
    ]

    def ratio(sample: Sequence[tuple[float, float]]) -> float:
        return fmean(a for a, _ in sample) / fmean(b for _, b in sample)

    rng = random.Random(seed)
    resampled = sorted(ratio(rng.choices(pairs, k=len(pairs))) for _ in range(BOOTSTRAP_SAMPLES))
    low, high = (resampled[int(share * BOOTSTRAP_SAMPLES)] for share in (0.025, 0.975))
    return Ratio(ratio(pairs), low, high, len(pairs))


@dataclass(frozen=True)
class StageCost:
    """What a stage took, and the resources that have its result."""

    resources: tuple[str, ...]
    stage: str
    seconds: float
    peak_memory_gib: float


@dataclass(frozen=True)
class Live:
    """What Prometheus answered while a small load ran."""

    acceptance_length: float
    tokens_per_second: float


@dataclass(frozen=True)
class Report:
    """Everything that the demonstration ends with."""

    evaluations: Mapping[str, EvaluateResult]
    """By drafter, Osprey first."""
    supervised_tokens: Mapping[str, int]
    ratio: Ratio
    ratio_by_domain: Mapping[str, Ratio]
    simulated_steps_equal: Mapping[str, float]
    """By drafter, share of requests whose verify steps equal the trainer's simulation."""
    stages: Sequence[StageCost]
    live: Live
    seconds: float
    peak_memory_gib: float

    def json(self) -> dict[str, Any]:
        """Return the report for machines; the two ratios stand at the top."""
        return {
            "acceptance_length_ratio": self.ratio.value,
            "acceptance_length_ratio_low": self.ratio.low,
            "acceptance_length_ratio_high": self.ratio.high,
            "prompts": self.ratio.prompts,
            "by_domain": {domain: asdict(ratio) for domain, ratio in self.ratio_by_domain.items()},
            "evaluations": {name: result.model_dump(mode="json") for name, result in self.evaluations.items()},
            "supervised_tokens": dict(self.supervised_tokens),
            "simulated_steps_equal": dict(self.simulated_steps_equal),
            "stages": [asdict(stage) for stage in self.stages],
            "live": asdict(self.live),
            "seconds": self.seconds,
            "peak_memory_gib": self.peak_memory_gib,
        }

    def text(self) -> str:
        """Return the report for people."""
        sections = (self._acceptance, self._positions, self._throughput, self._costs, self._summary)
        return "\n\n".join(section() for section in sections)

    def _acceptance(self) -> str:
        domains = [domain.name for domain in next(iter(self.evaluations.values())).by_domain]
        rows = [["acceptance length", *domains, "all", "all, corpus"]]
        for name, result in self.evaluations.items():
            lengths = {domain.name: domain.acceptance_length for domain in result.by_domain}
            rows.append(
                [
                    name,
                    *(f"{lengths[domain]:.3f}" for domain in domains),
                    f"{result.acceptance_length:.3f}",
                    f"{result.acceptance_length_corpus:.3f}",
                ]
            )
        rows.append(["ratio", *(f"{self.ratio_by_domain[domain].value:.3f}" for domain in domains),
                     f"{self.ratio.value:.3f}", ""])  # fmt: skip
        return table(rows)

    def _positions(self) -> str:
        count = max(len(result.acceptance_by_position) for result in self.evaluations.values())
        rows = [["accepted at position", *(str(position) for position in range(1, count + 1))]]
        rows += [
            [name, *(f"{share:.2f}" for share in result.acceptance_by_position)]
            for name, result in self.evaluations.items()
        ]
        return table(rows)

    def _throughput(self) -> str:
        rows = [["tokens per second", "without", "with", "speed-up", "same output", "steps as simulated"]]
        rows += [
            [
                name,
                f"{result.baseline_tokens_per_second:.1f}",
                f"{result.tokens_per_second:.1f}",
                f"{result.tokens_per_second / result.baseline_tokens_per_second:.2f}",
                f"{result.identical_outputs:.0%}",
                f"{self.simulated_steps_equal[name]:.0%}",
            ]
            for name, result in self.evaluations.items()
        ]
        return table(rows)

    def _costs(self) -> str:
        rows = [["stage", "of", "seconds", "peak GiB"]]
        rows += [
            [cost.stage, ", ".join(cost.resources), f"{cost.seconds:.0f}", f"{cost.peak_memory_gib:.2f}"]
            for cost in self.stages
        ]
        return table(rows)

    def _summary(self) -> str:
        tokens = ", ".join(f"{name} {count}" for name, count in self.supervised_tokens.items())
        return (
            f"Osprey over EAGLE-3: {self.ratio.value:.3f} (95 % interval {self.ratio.low:.3f} to "
            f"{self.ratio.high:.3f}, {self.ratio.prompts} held-out prompts; supervised tokens: {tokens})\n"
            f"live, by the metrics: acceptance length {self.live.acceptance_length:.3f}, "
            f"{self.live.tokens_per_second:.1f} tokens/s\n"
            f"{self.seconds / 60:.1f} minutes, peak memory {self.peak_memory_gib:.1f} GiB above the start"
        )


def table(rows: Sequence[Sequence[str]]) -> str:
    """Align rows in columns: the first to the left, the others to the right; the first row is the head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
