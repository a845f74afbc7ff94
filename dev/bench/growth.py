"""How time and memory of our step grow with the length of a sequence and with the vocabulary."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dev.bench import measure
from dev.bench.inputs import Case, Kind, prepare
from dev.bench.measure import Spread
from dev.bench.worker import Task

LENGTHS = (512, 1024, 2048, 4096, 8192)
VOCABULARIES = (32_768, 65_536, 131_072, 262_144)
_FLOAT = 4
WORKER = "dev.bench.worker"


@dataclass(frozen=True)
class Point:
    """A step with every row supervised, over the full vocabulary.

    Attributes:
        logits_mib: what a single fp32 tensor of tokens x vocabulary would take, of which there is none.
    """

    tokens: int
    vocabulary: int
    seconds: Spread
    peak_mib: Spread
    logits_mib: float


@dataclass(frozen=True)
class Growth:
    """Both curves.

    Attributes:
        floats_per_token: fp32 numbers that a further token takes, over the whole range of lengths.
        floats_per_vocabulary_entry: and a further token of the vocabulary.
        at_most: the largest vocabulary at twice the length.
        floats_per_token_at_most: `floats_per_token` of that vocabulary.
    """

    lengths: Sequence[Point]
    vocabularies: Sequence[Point]
    floats_per_token: float
    floats_per_vocabulary_entry: float
    at_most: Point
    floats_per_token_at_most: float


def measured(*, repeats: int) -> Growth:
    """Measure lengths at the smallest vocabulary, vocabularies at 1024 tokens, and the largest vocabulary at 2048."""
    lengths = [Case(VOCABULARIES[0], VOCABULARIES[0], Kind.ALL, tokens=tokens) for tokens in LENGTHS]
    vocabularies = [Case(size, size, Kind.ALL) for size in VOCABULARIES]
    crossed = replace(vocabularies[-1], tokens=2 * vocabularies[-1].tokens)
    cases = [*lengths, *vocabularies, crossed]
    prepare(cases)
    runs: dict[Case, list[dict[str, Any]]] = {case: [] for case in cases}
    for _ in range(repeats):
        for case, found in runs.items():
            found.append(measure.in_process(WORKER, asdict(Task(case))))
    points = {case: _point(case, found) for case, found in runs.items()}
    return growth([points[case] for case in lengths], [points[case] for case in vocabularies], points[crossed])


def growth(lengths: Sequence[Point], vocabularies: Sequence[Point], at_most: Point) -> Growth:
    """Draw a line from the first to the last point of each curve.

    Args:
        lengths: at one vocabulary.
        vocabularies: at one length.
        at_most: of the largest of these, at another length.
    """

    def slope(points: Sequence[Point], size: str) -> float:
        more = (points[-1].peak_mib.median - points[0].peak_mib.median) * 2**20 / _FLOAT
        return more / float(getattr(points[-1], size) - getattr(points[0], size))

    return Growth(
        lengths,
        vocabularies,
        slope(lengths, "tokens"),
        slope(vocabularies, "vocabulary"),
        at_most,
        slope([vocabularies[-1], at_most], "tokens"),
    )


def _point(case: Case, runs: Sequence[dict[str, Any]]) -> Point:
    return Point(
        case.tokens,
        case.vocabulary,
        Spread.of([value for run in runs for value in run["seconds"]]),
        Spread.of([run["peak_bytes"] / 2**20 for run in runs]),
        case.tokens * case.vocabulary * _FLOAT / 2**20,
    )
