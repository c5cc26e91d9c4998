from pathlib import Path
from types import TracebackType
from typing import Self

from pyarrow import Schema, Table

def write_table(table: Table, where: Path, compression: str = ...) -> None: ...
def read_table(source: Path | str) -> Table: ...

class FileMetaData:
    num_rows: int

def read_metadata(where: Path) -> FileMetaData: ...

class ParquetWriter:
    def __init__(self, where: Path, schema: Schema, compression: str = ...) -> None: ...
    def write_table(self, table: Table) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
