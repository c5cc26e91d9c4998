"""Run `isthmus` as a process, as a user does."""

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path

ISTHMUS = str(Path(sys.executable).parent / "isthmus")


@dataclass(frozen=True)
class Done:
    """What a command left behind."""

    status: int
    output: str
    errors: str


async def isthmus(*arguments: str, timeout_s: float = 30.0) -> Done:
    """Run a command to its end."""
    process = await asyncio.create_subprocess_exec(
        ISTHMUS,
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    ending = asyncio.ensure_future(process.communicate())
    try:
        await asyncio.wait({ending}, timeout=timeout_s)
        ended = ending.done()
    finally:
        if process.returncode is None:
            process.kill()
        output, errors = await ending
    assert ended, f"{' '.join(arguments)} took longer than {timeout_s:g} s; it said:\n{output!r}\n{errors!r}"
    assert process.returncode is not None
    return Done(process.returncode, output.decode(), errors.decode())
