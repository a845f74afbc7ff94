"""A loss that explodes, told apart from one that is only noisy."""

from statistics import median
from typing import Any

FACTOR = 3.0
"""A loss above so many times the usual one is high. Losses of single batches scatter less, but for a few."""
PATIENCE = 20
"""Steps in a row with a high loss: those of an odd batch pass."""
USUAL = 100
"""Steps whose median is the usual loss; it follows the curve down."""


class LossWatch:
    """Compares each loss with the median of the last ordinary ones.

    It is a function of the losses alone, so that all ranks, and a run that is resumed, find the same.
    """

    def __init__(self) -> None:
        self._ordinary: list[float] = []
        self._high = 0

    @property
    def usual(self) -> float:
        """Median of the last ordinary losses."""
        return median(self._ordinary)

    @property
    def is_calm(self) -> bool:
        """Whether the last loss was an ordinary one: what was trained so far is worth keeping."""
        return self._high == 0

    def exploded(self, loss: float) -> bool:
        """Takes the loss of a step, and says whether it has been high for too long."""
        if len(self._ordinary) >= PATIENCE and loss > FACTOR * self.usual:
            self._high += 1
        else:
            self._high = 0
            self._ordinary = [*self._ordinary, loss][-USUAL:]
        return self._high >= PATIENCE

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"ordinary": self._ordinary, "high": self._high}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there."""
        self._ordinary, self._high = list(state["ordinary"]), state["high"]
