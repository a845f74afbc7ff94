"""What each kind of cell is expected to take, with one thread, so that the default set fits its time.

Seconds of one core, from a run on a Xeon with AVX-512 and AMX, two cells at a time, beside other work at times.
"""

from dataclasses import dataclass
from enum import StrEnum

LIMIT_SECONDS = 75 * 60
"""Of a default run from nothing, on two cores."""


class Kind(StrEnum):
    """Cells that take alike."""

    TOKENIZE = "tokenize"
    PRUNE = "prune"
    PRETRAIN = "pretrain"
    ANSWER = "answer"
    CAPTURE = "capture"
    DISTIL = "distil"
    JUDGE = "judge"
    SERVE = "serve"


START: dict[Kind, float] = {
    Kind.TOKENIZE: 20,
    Kind.PRUNE: 14,
    Kind.PRETRAIN: 12,
    Kind.ANSWER: 40,
    Kind.CAPTURE: 14,
    Kind.DISTIL: 25,
    Kind.JUDGE: 8,
    Kind.SERVE: 50,
}
"""Seconds before the work begins: imports, weights, a server."""
UNIT: dict[tuple[Kind, str, int], float] = {
    (Kind.PRETRAIN, "", 1): 0.48,
    (Kind.PRETRAIN, "", 2): 0.75,
    (Kind.PRETRAIN, "", 4): 1.5,
    (Kind.ANSWER, "smollm2", 0): 0.009,
    (Kind.ANSWER, "gemma3", 0): 0.015,
    (Kind.CAPTURE, "smollm2", 0): 0.0034,
    (Kind.CAPTURE, "gemma3", 0): 0.004,
    (Kind.DISTIL, "smollm2", 0): 0.003,
    (Kind.DISTIL, "smollm2", 1): 0.0038,
    (Kind.DISTIL, "smollm2", 2): 0.0047,
    (Kind.DISTIL, "smollm2", 4): 0.009,
    (Kind.DISTIL, "gemma3", 0): 0.008,
    (Kind.DISTIL, "gemma3", 2): 0.0095,
    (Kind.JUDGE, "smollm2", 0): 2.8,
    (Kind.JUDGE, "gemma3", 0): 4,
    (Kind.SERVE, "", 0): 35,
}
"""Seconds a step of Stage 2, an answer token, a supervised token, a draft position judged, a batch size served.

By target and blocks (0: EAGLE-3), where they matter.
"""


@dataclass(frozen=True)
class Price:
    """What a cell is expected to take.

    Attributes:
        units: steps, tokens, positions or batch sizes, see `UNIT`.
        blocks: of the drafter or backbone.
        of: the target.
    """

    kind: Kind
    units: int = 0
    blocks: int = 0
    of: str = ""

    @property
    def seconds(self) -> float:
        """Of one core; of both where the cell runs alone."""
        return START[self.kind] + (UNIT[self.kind, self.of, self.blocks] * self.units if self.units else 0)
