"""The embedded ZooKeeper: it starts, it serves, and whatever happens to us, no server stays behind."""

import fcntl
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kazoo.client import KazooClient

import coordinator
from coordinator import embedded
from coordinator.embedded import EmbeddedZooKeeper, free_ports, sweep
from coordinator.errors import ZooKeeperStartError
from coordinator.fourletter import four_letter_sync, parse_fields
from coordinator.java import Java

REPOSITORY = Path(coordinator.__file__).parents[1]

PARENT = """
import os, signal, sys
from coordinator.embedded import EmbeddedZooKeeper
server = EmbeddedZooKeeper()
server.start()
# A forked child holds a copy of every descriptor, the guard's pipe among them.
child = os.fork() if sys.argv[1] == "forked" else 0
if child or sys.argv[1] == "plain":
    print(server.members[0].pid, child, server.directory, flush=True)
signal.pause()
"""


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Poll for a condition of another process, which cannot tell us itself."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not true after {timeout_s} s"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


@contextmanager
def client(hosts: str) -> Iterator[KazooClient]:
    """A connected client with the session timeout that brokers use."""
    connection = KazooClient(hosts=hosts, timeout=3.0)
    connection.start(timeout=15)
    try:
        yield connection
    finally:
        connection.stop()
        connection.close()


def mode_of(server: EmbeddedZooKeeper, index: int) -> str:
    answer = four_letter_sync("127.0.0.1", server.members[index].client_port, "srvr")
    return parse_fields(answer, ": ").get("Mode", "")


@pytest.mark.integration
def test_single_server_serves(zookeeper: EmbeddedZooKeeper, chroot: str) -> None:
    (member,) = zookeeper.members
    assert zookeeper.hosts == f"127.0.0.1:{member.client_port}"
    assert member.alive
    assert is_running(member.pid)
    with client(zookeeper.hosts) as connection:
        connection.create(chroot, b"value")
        assert connection.get(chroot)[0] == b"value"
        # The tick allows the short sessions that failure detection counts on.
        assert "to=3000" in four_letter_sync("127.0.0.1", member.client_port, "cons")
    assert any("binding to port" in line for line in zookeeper.log_tail(0, 1000))
    assert len(zookeeper.log_tail(0, 3)) == 3


@pytest.mark.integration
def test_private_directory_is_private_and_goes() -> None:
    server = EmbeddedZooKeeper()
    assert server.members == []
    with pytest.raises(ZooKeeperStartError, match="not started"):
        _ = server.hosts
    server.start()
    directory, pid = server.directory, server.members[0].pid
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    with pytest.raises(ZooKeeperStartError, match="already runs"):
        server.start()
    server.stop()
    assert not directory.exists()
    assert not is_running(pid)
    assert server.members == []
    server.stop()


@pytest.mark.integration
def test_kept_directory_keeps_data_and_is_used_by_one(tmp_path: Path) -> None:
    directory = tmp_path / "länger als nötig"
    with EmbeddedZooKeeper(directory=directory) as server:
        with client(server.hosts) as connection:
            connection.create("/kept", b"value")
        with pytest.raises(ZooKeeperStartError, match=f"in use by process {os.getpid()}"):
            EmbeddedZooKeeper(directory=directory).start()
        # A crash, not an orderly end: what was acknowledged must be there all the same.
        server.kill_member(0)
        assert not server.members[0].alive
        server.restart_member(0)
        with client(server.hosts) as connection:
            assert connection.get("/kept")[0] == b"value"
    with EmbeddedZooKeeper(directory=directory) as server, client(server.hosts) as connection:
        assert connection.get("/kept")[0] == b"value"


@pytest.mark.integration
def test_ensemble_survives_the_loss_of_its_leader() -> None:
    with EmbeddedZooKeeper(servers=3) as server:
        modes = [mode_of(server, index) for index in range(3)]
        assert sorted(modes) == ["follower", "follower", "leader"]
        leader = modes.index("leader")
        with client(server.hosts) as connection:
            connection.create("/before", b"1")
            server.kill_member(leader)
            assert [member.alive for member in server.members] == [index != leader for index in range(3)]
            connection.retry(connection.create, "/after", b"2")
            assert connection.retry(connection.get, "/before")[0] == b"1"
        server.restart_member(leader)
        assert all(member.alive for member in server.members)
        member = server.members[leader]
        with client(f"127.0.0.1:{member.client_port}") as connection:
            connection.sync("/")
            assert connection.get("/after")[0] == b"2"


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["plain", "forked"])
def test_killed_parent_leaves_no_server(kind: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, kind], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    ) as parent:
        assert parent.stdout is not None
        java_pid, child_pid, directory = parent.stdout.readline().split(maxsplit=2)
        try:
            assert is_running(int(java_pid))
            parent.kill()
            wait_until(lambda: not is_running(int(java_pid)))
        finally:
            parent.kill()
            if int(child_pid):
                os.kill(int(child_pid), signal.SIGKILL)
    left = Path(directory.strip())
    assert left.exists()
    # A child that was forked shares the lock: the directory is free when it is gone too.
    wait_until(lambda: not int(child_pid) or not is_running(int(child_pid)))
    sweep()
    assert not left.exists()


@pytest.mark.integration
def test_killed_guard_takes_the_server_along() -> None:
    with EmbeddedZooKeeper() as server:
        pid = server.members[0].pid
        guard_pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(guard_pid, signal.SIGKILL)
        wait_until(lambda: not is_running(pid))
        assert not server.members[0].alive


@pytest.mark.integration
def test_server_outlives_the_thread_that_started_it() -> None:
    server = EmbeddedZooKeeper()
    starter = threading.Thread(target=server.start)
    starter.start()
    starter.join()
    try:
        with client(server.hosts) as connection:
            assert connection.get_children("/") == ["zookeeper"]
    finally:
        server.stop()


@pytest.mark.integration
def test_forked_child_does_not_stop_its_parents_server() -> None:
    script = """
import os
from coordinator.embedded import EmbeddedZooKeeper
server = EmbeddedZooKeeper()
server.start()
child = os.fork()
if child:
    assert os.waitpid(child, 0)[1] == 0
    print(server.members[0].alive, server.directory.exists())
    server.stop()
"""
    answer = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=60,
        check=False,
    )
    assert (answer.stdout, answer.stderr) == ("True True\n", "")


@pytest.mark.integration
def test_taken_port_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        choices = iter([[port, *free_ports("127.0.0.1", 3)], free_ports("127.0.0.1", 4)])
        monkeypatch.setattr(embedded, "free_ports", lambda host, count: next(choices))
        with EmbeddedZooKeeper() as server:
            assert server.members[0].client_port != port
            assert mode_of(server, 0) == "standalone"
        assert list(choices) == []


@pytest.mark.integration
def test_another_server_on_our_port_is_not_taken_for_ours(zookeeper: EmbeddedZooKeeper) -> None:
    port = zookeeper.members[0].client_port
    server = EmbeddedZooKeeper(client_ports=[port])
    with pytest.raises(ZooKeeperStartError, match=f"port {port} on 127.0.0.1 is taken: .*client_ports"):
        server.start()
    assert server.members == []


def test_server_that_does_not_start_shows_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    executable = tmp_path / "java"
    executable.write_text("#!/bin/sh\necho 'Error: could not reserve the heap' >&2\nexit 3\n")
    executable.chmod(0o755)
    java = Java(executable, tmp_path, 17, "test")
    with pytest.raises(
        ZooKeeperStartError, match=r"(?s)ended with status 3.*JAVA_HOME.*could not reserve the heap"
    ):
        EmbeddedZooKeeper(java=java).start()
    assert list(tmp_path.iterdir()) == [executable]


def test_server_that_never_serves_is_given_up(tmp_path: Path) -> None:
    executable = tmp_path / "java"
    executable.write_text("#!/bin/sh\nexec sleep 300\n")
    executable.chmod(0o755)
    server = EmbeddedZooKeeper(java=Java(executable, tmp_path, 17, "test"))
    with pytest.raises(ZooKeeperStartError, match=r"does not serve after 0\.3 s: raise timeout_s"):
        server.start(timeout_s=0.3)
    assert server.members == []


def test_java_that_cannot_be_executed(tmp_path: Path) -> None:
    java = Java(tmp_path / "java", tmp_path, 17, "test")
    with pytest.raises(ZooKeeperStartError, match=r"(?s)status 127.*cannot run"):
        EmbeddedZooKeeper(java=java).start()


def test_sweep_takes_only_what_a_dead_owner_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead, alive, unmarked, stranger = (
        tmp_path / name
        for name in ("isthmus-zookeeper-dead", "isthmus-zookeeper-alive", "isthmus-zookeeper-new", "other")
    )
    for directory in (dead, alive, unmarked, stranger):
        directory.mkdir()
    for directory in (dead, alive, stranger):
        (directory / "owner").write_text("1\n")
    (tmp_path / "isthmus-zookeeper-link").symlink_to(stranger)
    with (alive / "owner").open() as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        assert sweep() == [dead]
    assert alive.exists()
    assert unmarked.exists()
    assert stranger.exists()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: EmbeddedZooKeeper(servers=2), "servers is 2: use 1, or 3"),
        (lambda: EmbeddedZooKeeper(tick_ms=0), "tick_ms is 0"),
        (lambda: EmbeddedZooKeeper(servers=3, client_ports=[2181]), "1 ports for 3 servers"),
    ],
)
def test_settings_that_cannot_work(build: Callable[[], EmbeddedZooKeeper], message: str) -> None:
    with pytest.raises(ZooKeeperStartError, match=message):
        build()


def test_free_ports_are_distinct_and_not_for_outgoing_connections() -> None:
    ports = free_ports("127.0.0.1", 9)
    first_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert len(set(ports)) == 9
    assert max(ports) < max(first_outgoing, embedded.FIRST_PORT + 9)
