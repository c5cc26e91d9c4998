from pathlib import Path

from pyarrow import Table

def write_csv(data: Table, output_file: Path | str) -> None: ...
