"""Rows of a Parquet file, a few hundred at a time."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from osprey_api.conditions import FailureReason
from osprey_runtime.errors import StageError

MAGIC = b"PAR1"
_ROWS_AT_ONCE = 512


def table_rows(path: Path, file: str) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a table as objects, by their numbers from 1.

    Raises:
        StageError: INVALID_DATA, it is damaged.
    """
    import pyarrow as pa  # noqa: PLC0415 - heavy, and not needed for other files
    import pyarrow.parquet as pq  # noqa: PLC0415

    number = 0
    try:
        with pq.ParquetFile(path) as table:
            for batch in table.iter_batches(_ROWS_AT_ONCE):
                for value in batch.to_pylist():
                    number += 1
                    yield number, value
    except (pa.ArrowException, OSError) as error:
        raise StageError(
            FailureReason.INVALID_DATA, f"{file} is a damaged Parquet file, after row {number}: {error}"
        ) from error
