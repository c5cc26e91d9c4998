"""Changing the links of a running testbed with an emulated WAN: what `isthmus topology link` calls."""

import asyncio
import json
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from topology.claims import running_testbeds
from topology.errors import DriverError
from topology.lines import LINE_MAX_BYTES

ANSWER_TIMEOUT_S: Final = 5.0


async def ask(
    control: Path, command: str, *, descriptors: Sequence[int] = (), **fields: Any
) -> dict[str, Any]:
    """Give the WAN a command, and open files along with it (SCM_RIGHTS).

    Raises DriverError if it refuses or does not answer.
    """
    request = json.dumps({"command": command, **fields}).encode() + b"\n"
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(control, limit=LINE_MAX_BYTES)
            try:
                if descriptors:
                    # A connection that is new has room for a request; the stream knows bytes only.
                    with socket.fromfd(
                        writer.get_extra_info("socket").fileno(), socket.AF_UNIX, socket.SOCK_STREAM
                    ) as sock:
                        socket.send_fds(sock, [request], list(descriptors))
                else:
                    writer.write(request)
                line = await reader.readline()
            finally:
                writer.close()
                await writer.wait_closed()
    except (OSError, TimeoutError) as error:
        raise DriverError(f"the WAN at {control} does not answer: {error!r}") from error
    if not line:
        raise DriverError(f"the WAN at {control} closed the connection: its log says why")
    answer = json.loads(line)
    assert isinstance(answer, dict)
    if "error" in answer:
        raise DriverError(answer["error"])
    return answer


def change_link(
    a: str, b: str, changes: Mapping[str, Any], *, one_way: bool = False, run: str | None = None
) -> dict[str, Any]:
    """Change conditions (`LinkConditions` by field) between two sites, both ways unless told otherwise.

    `run` names the testbed if several run. Gives the conditions that hold now, by direction.
    """
    return asyncio.run(ask(find_control(run), "link", a=a, b=b, one_way=one_way, changes=dict(changes)))


def cut_link(a: str, b: str, *, one_way: bool = False, run: str | None = None) -> dict[str, Any]:
    """Let nothing through between two sites."""
    return asyncio.run(ask(find_control(run), "cut", a=a, b=b, one_way=one_way))


def heal_link(a: str, b: str, *, one_way: bool = False, run: str | None = None) -> dict[str, Any]:
    """Let everything through again, under the conditions of before."""
    return asyncio.run(ask(find_control(run), "heal", a=a, b=b, one_way=one_way))


def find_control(run: str | None = None) -> Path:
    """The control socket of the testbed that runs here. Raises DriverError if it is not clear which."""
    found = {facts["run"]: facts for facts in running_testbeds() if Path(facts["control"]).exists()}
    if run is not None:
        if run not in found:
            raise DriverError(f"no testbed {run} runs: there {_listed(list(found))}")
        return Path(found[run]["control"])
    if len(found) != 1:
        remedy = "name one of them" if found else "start one with isthmus demo --driver netns"
        raise DriverError(f"there {_listed(list(found))} with an emulated WAN: {remedy}")
    return Path(next(iter(found.values()))["control"])


def _listed(runs: list[str]) -> str:
    if not runs:
        return "is no testbed"
    return f"{'is' if len(runs) == 1 else 'are'} {', '.join(runs)}"
