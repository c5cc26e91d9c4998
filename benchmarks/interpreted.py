"""Runs a module of ours interpreted, although compiled modules lie beside their sources.

python -m benchmarks.interpreted isthmus router ...
"""

import runpy
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Final

_PACKAGES: Final = ("overlay", "edge_broker", "routing_broker")


class _SourcesFirst(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        for folder in path or () if package in _PACKAGES else ():
            source = Path(folder) / f"{name}.py"
            if source.exists():
                return spec_from_file_location(fullname, source)
        return None


if __name__ == "__main__":
    sys.meta_path.insert(0, _SourcesFirst())
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
