"""What becomes of the rows of a data source: read = kept + dropped, and why a row is dropped."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from osprey_api.base import StatusModel

DEFAULT_MAX_DROPPED = 0.05
REASONS_SHOWN = 4
"""A termination message is short: of each source the most frequent reasons stand in it, the others as one."""


class DropReason(StrEnum):
    """Why a row is of no use. Like all reasons a closed set; the detail beside it is for a person."""

    # The row itself
    NOT_UTF8 = "NotUtf8"
    NOT_JSON = "NotJson"
    NOT_AN_OBJECT = "NotAnObject"
    # A field
    NO_FIELD = "NoField"
    WRONG_TYPE = "WrongType"
    BAD_CHARACTER = "BadCharacter"
    BLANK_TEXT = "BlankText"
    # A conversation
    EMPTY_CONVERSATION = "EmptyConversation"
    BAD_TURN = "BadTurn"
    UNKNOWN_ROLE = "UnknownRole"
    BLANK_TURN = "BlankTurn"
    BAD_TOOL_CALL = "BadToolCall"
    UNSUPPORTED_CONTENT = "UnsupportedContent"
    OPENS_WITHOUT_USER = "OpensWithoutUser"
    NO_QUESTION = "NoQuestion"
    # The target
    TEMPLATE_REFUSED = "TemplateRefused"
    TOO_LONG = "TooLong"
    # In a short list only: all the others together
    OTHER = "Other"


EXPLAINED = frozenset({DropReason.BLANK_TEXT, DropReason.TOO_LONG})
"""These say all by themselves, however many there are: a text without a character, a prompt that the target's context
does not hold. They are counted, but not against `maxDropped`."""


Dropped = Annotated[dict[DropReason, int], Field(max_length=len(DropReason))]


class RowCounts(StatusModel):
    """The rows of one source."""

    read: int = Field(default=0, description="Rows that were read.")
    kept: int = Field(default=0, description="Rows that are of use.")
    dropped: Dropped = Field(default_factory=dict, description="Rows that are not, by reason.")


def shortened(dropped: Mapping[DropReason, int]) -> dict[DropReason, int]:
    """Return the most frequent reasons, and the rest as `OTHER`: the sum stays the same."""
    ordered = sorted(dropped.items(), key=lambda item: (-item[1], item[0]))
    if len(ordered) <= REASONS_SHOWN:
        return dict(ordered)
    first, rest = ordered[: REASONS_SHOWN - 1], ordered[REASONS_SHOWN - 1 :]
    return {**dict(first), DropReason.OTHER: sum(count for _, count in rest)}
