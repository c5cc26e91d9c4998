"""An ensemble whose servers are started one by one, as on machines of their own."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from coordinator.errors import FourLetterError, ZooKeeperStartError
from coordinator.fourletter import four_letter_sync, parse_fields
from coordinator.member import CLIENT_PORT, prepare_member

HOSTS = ("127.0.73.1", "127.0.73.2", "127.0.73.3")


@contextmanager
def member(number: int, directory: Path) -> Iterator["subprocess.Popen[bytes]"]:
    # The launcher ends the server with us, even if we are killed.
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "topology.launcher", str(os.getpid()), "isthmus", "zookeeper"),
            *("--ensemble", ",".join(HOSTS), "--member", str(number), "--insecure"),
            *("--directory", str(directory / f"member-{number}")),
        ],
        stdout=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def modes(hosts: tuple[str, ...]) -> list[str]:
    found = []
    for host in hosts:
        try:
            found.append(parse_fields(four_letter_sync(host, CLIENT_PORT, "srvr"), ": ").get("Mode", "none"))
        except FourLetterError:
            found.append("none")
    return sorted(found)


def wait_for(hosts: tuple[str, ...], wanted: list[str]) -> None:
    deadline_s = time.monotonic() + 40
    while (seen := modes(hosts)) != wanted:
        assert time.monotonic() < deadline_s, f"{seen}, not {wanted}"
        time.sleep(0.05)


@pytest.mark.integration
def test_three_members_elect_a_leader_and_survive_the_loss_of_one(tmp_path: Path) -> None:
    with ExitStack() as stack:
        processes = [stack.enter_context(member(number, tmp_path)) for number in (1, 2, 3)]
        wait_for(HOSTS, ["follower", "follower", "leader"])
        leading = next(index for index, host in enumerate(HOSTS) if modes((host,)) == ["leader"])
        processes[leading].kill()
        rest = tuple(host for index, host in enumerate(HOSTS) if index != leading)
        wait_for(rest, ["follower", "leader"])


def test_writes_what_a_server_needs(tmp_path: Path) -> None:
    prepare_member(2, ["a", "b", "c"], tmp_path / "new" / "folder")
    folder = tmp_path / "new" / "folder"
    settings = (folder / "zoo.cfg").read_text().splitlines()
    assert {"server.1=a:2888:3888", "server.3=c:2888:3888", "clientPortAddress=b", "clientPort=2181"} <= set(
        settings
    )
    assert (folder / "data" / "myid").read_text() == "2\n"
    prepare_member(1, ["a"], tmp_path)
    assert "server." not in (tmp_path / "zoo.cfg").read_text()


@pytest.mark.parametrize(
    ("number", "hosts", "message"),
    [
        (1, ["a", "b"], "the ensemble a,b cannot be used: give 1, 3 or 5"),
        (1, ["a", "a", "b"], "the ensemble a,a,b cannot be used"),
        (4, ["a", "b", "c"], "member is 4: the ensemble has members 1 to 3"),
        (0, ["a"], "member is 0"),
    ],
)
def test_refuses_ensembles_that_cannot_be(
    number: int, hosts: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ZooKeeperStartError, match=message):
        prepare_member(number, hosts, tmp_path)


def test_refuses_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ZooKeeperStartError, match="cannot hold the server's data: Not a directory"):
        prepare_member(1, ["a"], file)
