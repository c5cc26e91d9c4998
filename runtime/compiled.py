"""Whether the hot modules run as machine code, and whether that is of the source beside it.

`pip install` compiles them where there is a C compiler, `make compile` does so in a working tree.
Python prefers a compiled module to its source, however old it is.
"""

from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import overlay

_PACKAGES = ("overlay", "edge_broker", "routing_broker", "simulation")


def compiled_modules() -> dict[str, Path]:
    """Compiled modules by name, such as `overlay.outbox`."""
    (root,) = [Path(place).parent for place in overlay.__path__]
    suffix = EXTENSION_SUFFIXES[0]
    return {
        f"{package}.{file.name.removesuffix(suffix)}": file
        for package in _PACKAGES
        for file in sorted((root / package).glob(f"*{suffix}"))
        if not file.name.endswith(f"__mypyc{suffix}")  # what they share
    }


def stale_modules() -> list[str]:
    """Names of compiled modules that are older than their source."""
    return [
        name
        for name, file in compiled_modules().items()
        if (source := file.with_name(f"{name.rpartition('.')[2]}.py")).exists()
        and source.stat().st_mtime > file.stat().st_mtime
    ]
