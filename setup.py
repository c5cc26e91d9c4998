"""Compiles the modules every message passes through, where that is possible; all else is in pyproject.toml.

They are ordinary typed Python and run interpreted too. Compiled they are what `pip install` gives
where there is a C compiler; an editable installation stays interpreted until `make compile`, so that
edits take effect. `ISTHMUS_COMPILE=0` and `=1` decide it either way; with 1 a failure is an error.
"""

import os
import shutil
import sys

from mypyc.build import mypycify
from setuptools import setup
from setuptools.extension import Extension

HOT_MODULES = (
    "overlay/batch.py",
    "overlay/bounds.py",
    "overlay/codec.py",
    "overlay/delay.py",
    "overlay/framing.py",
    "overlay/history.py",
    "overlay/limits.py",
    "overlay/liveness.py",
    "overlay/outbox.py",
    "overlay/quality.py",
    "overlay/retention.py",
    "overlay/schedule.py",
    "overlay/shedding.py",
    "overlay/tracer.py",
    "edge_broker/core.py",
    "edge_broker/dispatch.py",
    "edge_broker/frames.py",
    "edge_broker/model.py",
    "edge_broker/order.py",
    "edge_broker/resending.py",
    "edge_broker/resuming.py",
    "edge_broker/targets.py",
    "routing_broker/backup.py",
    "routing_broker/core.py",
    "routing_broker/model.py",
    "simulation/pipes.py",
    "simulation/schedule.py",
)
# What the hot modules' packages import besides is not there while the package is built.
QUIET = ("--follow-imports=silent", "--ignore-missing-imports")


def extensions() -> list[Extension]:
    """The compiled modules; none if they are not wanted or cannot be made here."""
    wanted = os.environ.get("ISTHMUS_COMPILE")
    compilers = (os.environ.get("CC", "cc"), "gcc", "clang")
    if wanted is None:
        # Asking for the package's description, or for an editable installation, compiles nothing.
        interpreted = {"dist_info", "egg_info", "editable_wheel"} & set(sys.argv)
        wanted = "0" if interpreted or not any(map(shutil.which, compilers)) else "try"
    if wanted == "0":
        return []
    os.environ.setdefault("MYPYPATH", "typings")
    made: list[Extension] = mypycify([*QUIET, *HOT_MODULES], opt_level="3", group_name="overlay.hot")
    for extension in made:
        extension.optional = wanted == "try"
    return made


setup(ext_modules=extensions())
