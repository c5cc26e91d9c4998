"""How the testbed talks with its own helper processes: JSON lines on standard input and output.

Commands come in on standard input, one object with `command` per line; answers and news go out on
standard output, one object with `event` per line. No port is opened, nobody else can interfere, and
the end of the input tells a helper that the testbed is gone.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

LINE_MAX_BYTES: Final = 4 * 1024 * 1024


def say(event: str, **fields: Any) -> None:
    """Tell the testbed something."""
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


def encode_line(content: Mapping[str, Any]) -> bytes:
    """One object as a line."""
    return json.dumps(content).encode() + b"\n"


async def read_commands() -> AsyncIterator[dict[str, Any]]:
    """Commands of the testbed, until it is gone."""
    reader = asyncio.StreamReader(limit=LINE_MAX_BYTES)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    try:
        while line := await reader.readline():
            yield json.loads(line)
    finally:
        transport.close()
