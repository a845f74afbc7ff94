"""Rows of a data source, one after the other: what can't be read as one is counted, and the others are yielded.

A source is a file, or a folder of files, in S3 or on a claim, or a data set of the hub.
"""

from collections.abc import Iterator
from itertools import islice

from osprey_api.conditions import FailureReason
from osprey_api.rows import DropReason
from osprey_api.sources import HubSource
from osprey_api.stages import Pinned, StorageLocation
from osprey_runtime import hub
from osprey_runtime.data.files import file_rows
from osprey_runtime.data.hub_rows import hub_rows
from osprey_runtime.data.ledger import DropError, Ledger
from osprey_runtime.data.row import Row
from osprey_runtime.data.text_rows import TextRows
from osprey_runtime.errors import StageError
from osprey_runtime.sources import content_digest, parsed

__all__ = ["DropError", "Ledger", "Row", "TextRows", "content_digest", "documents", "pin", "rows"]


def pin(uri: str, storage: StorageLocation, revision: str = "main") -> Pinned:
    """Return a data source as it is now: a hub data set at its commit, all else with the digest of its content.

    Raises:
        StageError: SOURCE_NOT_FOUND, SOURCE_ACCESS_DENIED or HUB_UNAVAILABLE.
    """
    source = parsed(uri)
    if not isinstance(source, HubSource):
        return Pinned(uri=uri, digest=content_digest(uri, storage))
    from huggingface_hub import HfApi  # noqa: PLC0415 - heavy, and not needed by other sources

    with hub.errors(uri):
        return Pinned(uri=uri, revision=HfApi().dataset_info(source.repository, revision=revision).sha)


def rows(
    source: Pinned, storage: StorageLocation, ledger: Ledger, *, text: TextRows, limit: int | None = None
) -> Iterator[Row]:
    """Yield the rows of a source that are objects, in their order.

    Args:
        source: as `resolve` found it.
        storage: whose endpoint and region are used for s3://.
        ledger: counts the rows. Whoever has no use for a row that is yielded drops it there, before the next one.
        text: what is a row of plain text.
        limit: so many are yielded at most. Where it is reached, only a part is known, and a part may be unlike the
            whole: too many that are dropped are no error.

    Raises:
        StageError: INVALID_DATA: no row at all, none that is kept, too many that are dropped, a file that can't be
            read on, or (after the last row) content that is not what was resolved; SOURCE_NOT_FOUND,
            SOURCE_ACCESS_DENIED, HUB_UNAVAILABLE.
    """
    match parsed(source.uri):
        case HubSource() as asked:
            found = hub_rows(source, asked, ledger, text)
        case _:
            found = file_rows(source, storage, ledger, text)
    yielded = 0
    for yielded, row in enumerate(islice(found, limit), start=1):  # noqa: B007 - counted beyond the loop
        yield row
    if not ledger.read:
        raise StageError(
            FailureReason.INVALID_DATA,
            f"{source.uri} has no row: name another file or split, or write a JSON object on each line",
        )
    ledger.check(whole=yielded != limit)


def documents(
    source: Pinned, field: str, storage: StorageLocation, ledger: Ledger, *, limit: int | None = None
) -> Iterator[str]:
    """Yield the texts of a source, in their order; what `rows` says of arguments and errors is true here too.

    Args:
        field: of a row that holds the text.
    """
    for row in rows(source, storage, ledger, text=TextRows.DOCUMENT, limit=limit):
        try:
            text = row.text(field)
            if not text.strip():
                raise DropError(DropReason.BLANK_TEXT, f"field {field!r} is blank")  # noqa: TRY301 - as one of `text`
        except DropError as error:
            ledger.drop(error.reason, row.place, error.detail)
        else:
            yield text
