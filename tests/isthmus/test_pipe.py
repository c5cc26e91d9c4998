"""`isthmus pub` and `isthmus sub` in a shell pipe, as processes."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from tests.integration.harness import eventually, overlay

pytestmark = pytest.mark.integration

ISTHMUS = str(Path(sys.executable).parent / "isthmus")


async def isthmus(*arguments, stdin=b"", timeout_s=20.0):
    process = await asyncio.create_subprocess_exec(
        ISTHMUS,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(timeout_s):
        output, errors = await process.communicate(stdin)
    return process.returncode, output.decode(), errors.decode()


@pytest.fixture
async def lan(zookeeper_hosts, chroot):
    async with overlay(zookeeper_hosts, chroot) as testbed:
        await testbed.edge("ea", "a")
        yield testbed


async def test_lines_go_in_and_come_out(lan):
    edge = f"--edge={lan.edges['ea'].locator}"
    subscriber = asyncio.create_task(isthmus("sub", "door", edge, "--count=3", "--timeout-s=15"))
    status, _, errors = await isthmus(
        "pub", "door", edge, "--wait-for-subscribers=1", "--json", stdin=b"open\nshut\n\xff\n"
    )
    assert status == 0
    assert json.loads(errors) == {"topic": "door", "sent": 3, "edge": "ea"}
    process_status, output, _ = await _bytes(subscriber)
    assert process_status == 0
    assert output.splitlines()[:2] == ["open", "shut"]


async def _bytes(task):
    try:
        return await task
    except UnicodeDecodeError as error:
        return 0, error.object[: error.start].decode(), ""


async def test_json_carries_binary_payloads_and_sequences(lan):
    edge = f"--edge={lan.edges['ea'].locator}"
    subscriber = asyncio.create_task(isthmus("sub", "door", edge, "--count=2", "--json", "--timeout-s=15"))
    await isthmus("pub", "door", edge, "--wait-for-subscribers=1", stdin=b"open\n\xff\n")
    _, output, _ = await subscriber
    first, second = map(json.loads, output.splitlines())
    assert (first["topic"], first["payload"], first["sequence"]) == ("door", "open", 1)
    assert second["payload_base64"] == "/w=="


async def test_a_reader_that_closes_the_pipe_ends_the_subscriber_quietly(lan):
    edge = lan.edges["ea"].locator
    process = await asyncio.create_subprocess_shell(
        f"{ISTHMUS} sub door --edge {edge} | head -n 1",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    client = await lan.client("ea")
    publisher = await client.publisher("door")
    await publisher.wait_for_subscribers(1, 10)

    async def publish():
        await publisher.publish(b"open")
        return process.returncode is not None

    reading = asyncio.create_task(process.communicate())
    await eventually(publish, "the pipe ends")
    output, errors = await reading
    assert output == b"open\n"
    assert errors == b""


async def test_bad_input_gives_one_line_and_status_1_or_2(lan):
    edge = f"--edge={lan.edges['ea'].locator}"
    status, _, errors = await isthmus("pub", "door", "open", edge, "--qos", "deadline_ms=-1")
    assert status == 1
    assert "deadline_ms is -1" in errors
    status, _, errors = await isthmus("pub", "door", "open", edge, "--qos", "deadline")
    assert status == 2
    assert "NAME=VALUE" in errors
    status, _, errors = await isthmus("pub", "door", "open", "--edge=127.0.0.1:1", "--connect-timeout-s=0.3")
    assert status == 1
    assert "isthmus edge" in errors
    status, _, errors = await isthmus("sub", "door", edge, "--timeout-s=0.2")
    assert status == 1
    assert "no message within 0.2 s" in errors
    status, _, errors = await isthmus("edge", "--listen=0.0.0.0:0", "--lan=a")
    assert status == 1
    assert "--insecure" in errors
    status, _, errors = await isthmus("router", "--heartbeat-ms=100", "--silence-ms=100")
    assert status == 1
    assert "three of them" in errors


async def test_ages_and_events_are_printed_where_asked_for(lan):
    edge = f"--edge={lan.edges['ea'].locator}"
    subscriber = asyncio.create_task(
        isthmus(
            "sub", "door", edge, "--count=30", "--ages", "--events", "--limit-ms=0.0001", "--timeout-s=15"
        )
    )
    await isthmus("pub", "door", "open", "--repeat=30", "--rate=100", edge, "--wait-for-subscribers=1")
    status, output, errors = await subscriber
    assert status == 0
    lines = output.splitlines()
    assert len(lines) == 30
    assert all(line.endswith("open") for line in lines)
    assert " ms SLOW  open" in lines[-1]
    assert "event=slow topic=door" in errors


async def test_json_has_the_age_bound(lan):
    edge = f"--edge={lan.edges['ea'].locator}"
    subscriber = asyncio.create_task(
        isthmus("sub", "door", edge, "--count=30", "--json", "--limit-ms=10000", "--timeout-s=15")
    )
    await isthmus("pub", "door", "open", "--repeat=30", "--rate=100", edge, "--wait-for-subscribers=1")
    _, output, _ = await subscriber
    last = json.loads(output.splitlines()[-1])
    assert 0 < last["age_bound_ms"] < 10_000
    assert (last["limit_ms"], last["slow"], last["fast"]) == (10_000, False, True)
