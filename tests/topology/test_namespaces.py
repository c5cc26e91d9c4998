"""Namespaces go with their run, and leftovers of a killed runner with the next one; others stay."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.topology.namespaces_needed import needs_namespaces
from topology.claims import running_testbeds, state_directory
from topology.errors import DriverError
from topology.namespaces import (
    NAMESPACES_DIRECTORY,
    Namespaces,
    enter,
    inside,
    names_of,
    open_socket,
    run_ip,
    sweep,
)

pytestmark = needs_namespaces

KILLED_RUNNER = """
import sys
from topology.namespaces import Namespaces
namespaces = Namespaces()
namespaces.claim()
namespaces.add("one")
namespaces.add("two")
print(namespaces.run, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def namespaces() -> Iterator[Namespaces]:
    made = Namespaces()
    made.claim(what="a test")
    yield made
    made.remove_all()


def _own_namespace() -> str:
    return str(Path("/proc/thread-self/ns/net").readlink())


def test_a_namespace_is_another_network_and_goes_with_its_run(namespaces: Namespaces) -> None:
    home = _own_namespace()
    namespaces.add("here")
    with inside(namespaces.path("here")):
        assert _own_namespace() != home
        # Only its loopback: there is no way to the machine's own networks.
        assert [name for _, name in socket.if_nameindex() if not name.endswith("0")] == ["lo"]
        assert Path("/proc/sys/net/ipv4/ip_forward").read_text().strip() == "0"
    assert _own_namespace() == home
    with (
        open_socket(namespaces.path("here"), socket.AF_INET, socket.SOCK_DGRAM) as sock,
        pytest.raises(OSError, match="unreachable"),
    ):
        sock.connect(("198.18.0.1", 9))
    run = namespaces.run
    assert [facts["what"] for facts in running_testbeds() if facts["run"] == run] == ["a test"]
    assert names_of(run) == [namespaces.name("here")]
    namespaces.remove_all()
    assert names_of(run) == []
    assert all(facts["run"] != run for facts in running_testbeds())


def test_the_thread_comes_home_after_an_error(namespaces: Namespaces) -> None:
    home = _own_namespace()
    namespaces.add("here")
    with pytest.raises(RuntimeError), inside(namespaces.path("here")):
        raise RuntimeError
    assert _own_namespace() == home


def test_sweep_takes_leftovers_of_the_dead_and_nothing_else(namespaces: Namespaces) -> None:
    namespaces.add("alive")
    # Looks like ours, but no state file says so.
    stranger = f"isthmus-{os.getpid()}-stranger"
    run_ip("netns", "add", stranger)
    try:
        runner = subprocess.Popen(
            [sys.executable, "-c", KILLED_RUNNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        with runner:
            assert runner.stdout is not None
            dead = runner.stdout.readline().strip()
            assert len(names_of(dead)) == 2
            assert dead not in sweep(), "its runner is alive"
            runner.send_signal(signal.SIGKILL)
        assert len(names_of(dead)) == 2
        assert dead in sweep()
        assert names_of(dead) == [] and not (state_directory() / f"{dead}.json").exists()
        assert names_of(namespaces.run) == [namespaces.name("alive")]
        assert (NAMESPACES_DIRECTORY / stranger).exists()
    finally:
        run_ip("netns", "del", stranger)


def test_errors_say_what_ip_said() -> None:
    with pytest.raises(DriverError, match="ip -n isthmus-nowhere link failed: Cannot open network namespace"):
        run_ip("-n", "isthmus-nowhere", "link")
    with pytest.raises(FileNotFoundError):
        enter(NAMESPACES_DIRECTORY / "isthmus-nowhere")
