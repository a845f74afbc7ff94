"""Rows of a Parquet file, a few hundred at a time."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from osprey_api.conditions import FailureReason
from osprey_api.rows import DropReason
from osprey_runtime.data.ledger import DropError
from osprey_runtime.errors import StageError

MAGIC = b"PAR1"
_ROWS_AT_ONCE = 512


def table_rows(path: Path, file: str) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a table as objects, by their numbers from 1; of one that can't be read, its `DropError`.

    Raises:
        StageError: INVALID_DATA, it is damaged.
    """
    import pyarrow as pa  # noqa: PLC0415 - heavy, and not needed for other files
    import pyarrow.parquet as pq  # noqa: PLC0415

    number = 0
    try:
        with pq.ParquetFile(path) as table:
            for batch in table.iter_batches(_ROWS_AT_ONCE):
                for value in _values(batch):
                    number += 1
                    yield number, value
    except (pa.ArrowException, OSError) as error:
        raise StageError(
            FailureReason.INVALID_DATA, f"{file} is a damaged Parquet file, after row {number}: {error}"
        ) from error


def _values(batch: Any) -> Iterator[Any]:
    """Return the rows of a `pyarrow.RecordBatch`."""
    try:
        return iter(batch.to_pylist())
    except (ValueError, OverflowError):  # it does not say in which row
        return (_value(batch.slice(number, 1)) for number in range(batch.num_rows))


def _value(row: Any) -> Any:
    value = {}
    for name, column in zip(row.schema.names, row.columns, strict=True):
        try:
            (value[name],) = column.to_pylist()
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            return DropError(DropReason.NOT_UTF8, f"field {name!r}: byte {error.start + 1} (0x{byte:02x}) is not UTF-8")
        except (ValueError, OverflowError) as error:
            return DropError(DropReason.WRONG_TYPE, f"field {name!r} can't be read ({error})")
    return value
