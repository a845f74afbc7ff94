"""Which keys a row sees, as slices: what takes the place of a [rows, keys] mask."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np


@dataclass(frozen=True)
class Run:
    """Consecutive rows of one dialogue. Each sees the keys of its own dialogue up to its own place.

    Attributes:
        rows: places among the rows that are run.
        before: keys of the same dialogue before the first of them: all of them see all of these.
        own: keys of the same places as the rows: these are seen causally.
    """

    rows: slice
    before: slice
    own: slice


def runs(rows: Sequence[int], lengths: Sequence[int]) -> tuple[Run, ...]:
    """Cuts rows into runs.

    Args:
        rows: places in the batch, ascending.
        lengths: of the dialogues that are packed in it.
    """
    places = np.asarray(rows, dtype=np.int64)
    starts = np.cumsum([0, *lengths])
    dialogues = np.searchsorted(starts, places, side="right") - 1
    breaks = np.flatnonzero((np.diff(places) != 1) | (np.diff(dialogues) != 0)) + 1
    found = []
    for first, end in pairwise([0, *breaks.tolist(), len(places)]):
        if first < end:
            place, start = int(places[first]), int(starts[dialogues[first]])
            found.append(Run(slice(first, end), slice(start, place), slice(place, place + end - first)))
    return tuple(found)
