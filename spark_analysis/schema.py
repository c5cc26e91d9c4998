"""The trace schema of `overlay.trace` as Arrow types, and where shipped traces lie."""

from collections.abc import Iterable
from typing import Final

import pyarrow as pa

from overlay.trace import ROW_COLUMNS, SEGMENT_COLUMNS, Column

_TYPES: Final = {
    "long": pa.int64(),
    "string": pa.string(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "timestamp": pa.timestamp("us", tz="UTC"),
}


def _schema(columns: Iterable[Column]) -> pa.Schema:
    return pa.schema([pa.field(column.name, _TYPES[column.kind]) for column in columns])


ARROW_ROWS: Final = _schema(ROW_COLUMNS)
ARROW_SEGMENTS: Final = _schema(SEGMENT_COLUMNS)

ROWS_FOLDER: Final = "rows"
SEGMENTS_FOLDER: Final = "segments"
"""Below the folder of shipped traces."""
