"""One row of a data source, whatever it was read from."""

from dataclasses import dataclass
from typing import Any, Literal

from osprey_api.rows import DropReason
from osprey_runtime.data.ledger import DropError

Unit = Literal["line", "item", "row"]
"""What is counted in a file: lines of text, items of a JSON list, rows of a table."""


@dataclass(frozen=True)
class Row:
    """One object of a source."""

    file: str
    """URI of the file; of a hub data set, its own."""
    line: int
    """From 1, in `unit`s; lines as an editor counts them."""
    value: dict[str, Any]
    unit: Unit = "line"

    @property
    def place(self) -> str:
        """Where it stands, for a person."""
        return place(self.file, self.line, self.unit)

    def text(self, field: str) -> str:
        """Return a field that must hold text.

        Raises:
            DropError: NO_FIELD, WRONG_TYPE or BAD_CHARACTER.
        """
        if field not in self.value:
            raise DropError(
                DropReason.NO_FIELD,
                f"there is no field {field!r}, the fields are: {', '.join(sorted(self.value)) or 'none'}; "
                "name one of them",
            )
        return text_of(self.value[field], f"field {field!r}")


def place(file: str, number: int, unit: Unit) -> str:
    """Return where something stands in a file, for a person."""
    return f"{file} {unit} {number}"


def text_of(value: Any, what: str) -> str:
    """Return a value that must be text.

    Raises:
        DropError: WRONG_TYPE, it is none; BAD_CHARACTER, it cannot be written as UTF-8.
    """
    if not isinstance(value, str):
        raise DropError(DropReason.WRONG_TYPE, f"{what} holds {kind(value)} and no text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise DropError(
            DropReason.BAD_CHARACTER, f"{what} holds half of a surrogate pair, which is no character"
        ) from None
    return value


def kind(value: Any) -> str:
    """Say what a JSON value is."""
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")
