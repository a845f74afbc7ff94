"""Rows of a data set of the hub: as its library reads it, or one of its files as ours is read."""

from collections.abc import Iterator
from pathlib import Path

from osprey_api.conditions import FailureReason
from osprey_api.sources import HubSource
from osprey_api.stages import Pinned
from osprey_runtime import hub
from osprey_runtime.data.files import stored_rows
from osprey_runtime.data.ledger import Ledger
from osprey_runtime.data.row import Row
from osprey_runtime.data.text_rows import TextRows
from osprey_runtime.errors import StageError
from osprey_runtime.store.local import LocalStore

_OPTIONS = {"name", "split", "file"}


def hub_rows(source: Pinned, asked: HubSource, ledger: Ledger, text: TextRows) -> Iterator[Row]:
    """Yield the rows of a split, or with ?file=PATH those of one file of the repository.

    Raises:
        StageError: INVALID_CONFIG, an unknown option; INVALID_DATA, the library can't read on; SOURCE_NOT_FOUND,
            SOURCE_ACCESS_DENIED, HUB_UNAVAILABLE.
    """
    from huggingface_hub import HfApi, hf_hub_download  # noqa: PLC0415 - heavy, and not needed by other sources

    unknown = set(asked.options) - _OPTIONS
    if unknown:
        raise StageError(
            FailureReason.INVALID_CONFIG,
            f"{source.uri}: {min(unknown)!r} is no option, write ?name=…&split=…, or ?file=PATH for one file of it",
        )
    with hub.errors(source.uri):
        # Asked first, since load_dataset says of a gated data set that it isn't there.
        HfApi().dataset_info(asked.repository, revision=source.revision)
        if path := asked.options.get("file"):
            found = Path(hf_hub_download(asked.repository, path, repo_type="dataset", revision=source.revision))
    if path:
        yield from stored_rows(LocalStore(found.parent), found.name, source.uri, ledger, text)
    else:
        yield from _split_rows(source, asked, ledger)


def _split_rows(source: Pinned, asked: HubSource, ledger: Ledger) -> Iterator[Row]:
    import datasets  # noqa: PLC0415 - heavy, and not needed by other sources
    import pyarrow as pa  # noqa: PLC0415 - comes with datasets

    with hub.errors(source.uri):
        try:
            found = datasets.load_dataset(
                asked.repository,
                asked.options.get("name"),
                split=asked.options.get("split", "train"),
                revision=source.revision,
                streaming=True,
            )
        except (FileNotFoundError, ValueError) as error:  # no file of data, or no such configuration or split
            raise StageError(FailureReason.SOURCE_NOT_FOUND, f"{source.uri}: {error}") from error
        try:
            for number, value in enumerate(found, start=1):
                ledger.read += 1
                yield Row(source.uri, number, value, "row")
        except (datasets.exceptions.DatasetsError, pa.ArrowException, ValueError, TypeError) as error:
            # By columns, a field must have one type in all rows.
            raise StageError(
                FailureReason.INVALID_DATA,
                f"{source.uri} can't be read on after row {ledger.read}: {' '.join(str(error).split())[:300]}; "
                "name its files one by one, ?file=PATH: those are read row by row, whatever a field holds in each",
            ) from error
