"""Markdown that pages of measurements are made of."""

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as a table, the first of them its head."""
    head, *others = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([head, "|" + "---|" * len(rows[0]), *others])
