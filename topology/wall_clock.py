"""A wall clock that can be shifted for some processes while they run, without touching the machine's.

A time namespace would not do: the kernel has those for the monotonic clocks only. So the processes are
started with a small library before libc (LD_PRELOAD) that adds an offset to what the real clock says. It
is made with the machine's C compiler, and reads the offset from a file that it maps into memory, so a
shift takes effect at once and everywhere in the process: in our code, in kazoo, in Python itself. The
monotonic clock, which all timing of Isthmus rests on, passes through unchanged. ZooKeeper keeps the
machine's clock: that brokers and servers disagree about the time of day is part of the fault.
"""

import asyncio
import shutil
import struct
from pathlib import Path
from typing import Final

from topology.errors import DriverError

_SOURCE: Final = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static const volatile int64_t *offset_ns;
static int (*real_clock_gettime)(clockid_t, struct timespec *);

__attribute__((constructor)) static void start(void) {
    real_clock_gettime = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    const char *path = getenv("WALL_CLOCK_OFFSET_FILE");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file >= 0) {
        void *map = mmap(0, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
        if (map != MAP_FAILED) offset_ns = map;
    }
}

int clock_gettime(clockid_t clock, struct timespec *at) {
    if (!real_clock_gettime) start();
    int failed = real_clock_gettime(clock, at);
    if (!failed && offset_ns && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        int64_t now_ns = (int64_t)at->tv_sec * 1000000000 + at->tv_nsec + *offset_ns;
        at->tv_sec = now_ns / 1000000000;
        at->tv_nsec = now_ns % 1000000000;
    }
    return failed;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    struct timespec now;
    int failed = clock_gettime(CLOCK_REALTIME, &now);
    if (!failed && at) { at->tv_sec = now.tv_sec; at->tv_usec = now.tv_nsec / 1000; }
    return failed;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
"""


class WallClock:
    """The shift of all processes that were started with `environment`."""

    def __init__(self, library: Path, offset_file: Path) -> None:
        self._offset_file = offset_file
        self.environment = {"LD_PRELOAD": str(library), "WALL_CLOCK_OFFSET_FILE": str(offset_file)}
        self.shift(0.0)

    @classmethod
    async def make(cls, directory: Path) -> "WallClock":
        """Build the library in a directory. Raises DriverError without a C compiler."""
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            raise DriverError("no C compiler was found, which shifting a wall clock needs: install gcc")
        source, library = directory / "wall_clock.c", directory / "wall_clock.so"
        source.write_text(_SOURCE, encoding="utf-8")
        process = await asyncio.create_subprocess_exec(
            *(compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        _, problems = await process.communicate()
        if process.returncode:
            raise DriverError(f"the wall clock could not be built: {problems.decode(errors='replace')}")
        return cls(library, directory / "wall_clock_offset")

    def shift(self, seconds: float) -> None:
        """Be ahead of the machine's clock by so much from now on; behind it if negative."""
        # Written in place: others have this very file in their memory.
        with self._offset_file.open("r+b" if self._offset_file.exists() else "w+b") as file:
            file.write(struct.pack("=q", round(seconds * 1e9)))
