"""The account of a source's rows: which were of no use, why, and whether they are too many to go on."""

import json
import logging
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from osprey_api.conditions import FailureReason
from osprey_api.rows import DEFAULT_MAX_DROPPED, EXPLAINED, DropReason, RowCounts
from osprey_runtime.errors import StageError

log = logging.getLogger("osprey_runtime")

ROWS_FILE = "rows.json"
"""Of an artifact: the ledgers of its sources."""
EXAMPLES = 5
"""Of each reason, so many rows are named."""
_EXAMPLES_IN_MESSAGE = 3
_CHECKED_EARLY = 100_000
"""Rows after which too large a loss ends the reading; before its end a smaller part may be unlike the whole."""
_DETAIL_LIMIT = 300


class DropError(Exception):
    """A row is of no use. Expected, and never the end of a stage by itself."""

    def __init__(self, reason: DropReason, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


class Ledger:
    """Counts one source's rows.

    Args:
        uri: of the source.
        max_dropped: largest share of the rows that may be dropped for reasons that are not `EXPLAINED`.
    """

    def __init__(self, uri: str, max_dropped: float = DEFAULT_MAX_DROPPED) -> None:
        self.uri = uri
        self.read = 0
        self.dropped: Counter[DropReason] = Counter()
        self.examples: dict[DropReason, list[str]] = {}
        self._max_dropped = max_dropped

    @property
    def kept(self) -> int:
        """Rows that are of use."""
        return self.read - self.dropped.total()

    @property
    def counts(self) -> RowCounts:
        """What stands in an artifact."""
        return RowCounts(read=self.read, kept=self.kept, dropped=dict(sorted(self.dropped.items())))

    def drop(self, reason: DropReason, place: str, detail: str) -> None:
        """Count a row that was read and is of no use.

        Args:
            reason: why.
            place: file and line.
            detail: why, for a person.

        Raises:
            StageError: INVALID_DATA, too many were dropped of many.
        """
        self.dropped[reason] += 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < EXAMPLES:
            said = detail.encode(errors="backslashreplace").decode()
            said = said if len(said) <= _DETAIL_LIMIT else said[: _DETAIL_LIMIT - 1] + "…"
            examples.append(f"{place}: {said}")
            log.warning("dropped (%s): %s: %s", reason, place, said)
        if self.read >= _CHECKED_EARLY:
            self._check_share()

    def check(self, *, whole: bool = True) -> None:
        """Check the account when all rows are read, or as many as are wanted.

        Args:
            whole: all of the source was read; of a part the share of what was dropped says nothing.

        Raises:
            StageError: INVALID_DATA: none was kept, or more were dropped than may be.
        """
        if self.read and not self.kept:
            raise StageError(
                FailureReason.INVALID_DATA,
                f"{self.uri}: none of {self.read} rows can be used ({self._reasons()}): {self._named()}",
            )
        if whole:
            self._check_share()

    def _check_share(self) -> None:
        lost = sum(count for reason, count in self.dropped.items() if reason not in EXPLAINED)
        if lost > self._max_dropped * self.read:
            raise StageError(
                FailureReason.INVALID_DATA,
                f"{self.uri}: {lost} of {self.read} rows cannot be used ({self._reasons()}), and the share that may be "
                f"dropped is {self._max_dropped:g}: correct these rows, or raise maxDropped of this data source to go "
                f"on without them: {self._named()}",
            )

    def _reasons(self) -> str:
        return ", ".join(f"{reason} {count}" for reason, count in self.dropped.most_common())

    def _named(self) -> str:
        """Return one example of each reason, and more of the most frequent one."""
        first, *others = [self.examples[reason] for reason, _ in self.dropped.most_common()]
        return "; ".join([*first[:_EXAMPLES_IN_MESSAGE], *(examples[0] for examples in others)])


def write(folder: Path, **parts: Iterable[Ledger]) -> None:
    """Write the ledgers of an artifact into its folder, a list of them by the name of what they count."""
    content = {
        name: [
            {"uri": ledger.uri, **ledger.counts.model_dump(mode="json"), "examples": ledger.examples}
            for ledger in ledgers
        ]
        for name, ledgers in parts.items()
    }
    (folder / ROWS_FILE).write_text(json.dumps(content, indent=2) + "\n")


def total(ledgers: Iterable[Ledger]) -> RowCounts:
    """Return the counts of several sources together."""
    every = list(ledgers)
    dropped = sum((ledger.dropped for ledger in every), Counter[DropReason]())
    return RowCounts(
        read=sum(ledger.read for ledger in every),
        kept=sum(ledger.kept for ledger in every),
        dropped=dict(sorted(dropped.items())),
    )
