"""What each kind of cell is expected to take, with one thread, so that the default set fits its time.

Seconds of one core. Those of the demonstration's stages are scaled from its figures (docs/demo.md), the others are
guesses until a whole run has been measured.
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
    Kind.PRUNE: 8,
    Kind.PRETRAIN: 12,
    Kind.ANSWER: 40,
    Kind.CAPTURE: 15,
    Kind.DISTIL: 35,
    Kind.JUDGE: 10,
    Kind.SERVE: 40,
}
"""Seconds before the work begins: imports, weights, a server."""
UNIT: dict[tuple[Kind, str, int], float] = {
    (Kind.PRETRAIN, "", 1): 0.45,
    (Kind.PRETRAIN, "", 2): 0.65,
    (Kind.PRETRAIN, "", 4): 1.0,
    (Kind.ANSWER, "smollm2", 0): 0.007,
    (Kind.ANSWER, "gemma3", 0): 0.02,
    (Kind.CAPTURE, "smollm2", 0): 0.004,
    (Kind.CAPTURE, "gemma3", 0): 0.008,
    (Kind.DISTIL, "smollm2", 0): 0.0036,
    (Kind.DISTIL, "smollm2", 1): 0.0036,
    (Kind.DISTIL, "smollm2", 2): 0.005,
    (Kind.DISTIL, "smollm2", 4): 0.008,
    (Kind.DISTIL, "gemma3", 0): 0.006,
    (Kind.DISTIL, "gemma3", 2): 0.007,
    (Kind.JUDGE, "smollm2", 0): 4,
    (Kind.JUDGE, "gemma3", 0): 4,
    (Kind.SERVE, "", 0): 30,
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
