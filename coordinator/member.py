"""One ZooKeeper server of an ensemble that is spread over machines or containers.

`EmbeddedZooKeeper` runs all servers on one machine and guards them. Here the machine or container is
the guard: this process becomes the server, keeps its data in a folder and logs to standard output. Every
member is started with the same list of hosts; all use the same three ports.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

from coordinator.embedded import TICK_MS, server_command, server_settings, tls_settings, write_tls_files
from coordinator.errors import ZooKeeperStartError
from coordinator.java import find_java

CLIENT_PORT: Final = 2181
SECURE_CLIENT_PORT: Final = 2281
QUORUM_PORT: Final = 2888
ELECTION_PORT: Final = 3888

_LOG4J2: Final = """\
status = error
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{ISO8601} %-5p %c{1} - %m%n
rootLogger.level = info
rootLogger.appenderRef.console.ref = console
"""


def prepare_member(
    number: int, hosts: Sequence[str], directory: Path, certificates: Path | None = None
) -> None:
    """Write what server `number` (from 1) of these hosts needs; data of an earlier life stay.

    With `certificates` servers encrypt among themselves, clients use another port, and the plain one is
    for this host alone.
    """
    if len(hosts) not in (1, 3, 5) or len(set(hosts)) != len(hosts):
        raise ZooKeeperStartError(
            f"the ensemble {','.join(hosts)} cannot be used: give 1, 3 or 5 different hosts, host,host,host"
        )
    if not 1 <= number <= len(hosts):
        raise ZooKeeperStartError(f"member is {number}: the ensemble has members 1 to {len(hosts)}")
    peers = [f"{_bracketed(host)}:{QUORUM_PORT}:{ELECTION_PORT}" for host in hosts]
    host = hosts[number - 1] if certificates is None else "127.0.0.1"
    settings = server_settings(host, CLIENT_PORT, peers if len(hosts) > 1 else [], TICK_MS, force_sync=True)
    if certificates is not None:
        settings += tls_settings(hosts[number - 1], SECURE_CLIENT_PORT, ensemble=len(hosts) > 1)
    try:
        (directory / "data").mkdir(mode=0o700, parents=True, exist_ok=True)
        if certificates is not None:
            write_tls_files(certificates, directory)
        (directory / "zoo.cfg").write_text(settings)
        (directory / "log4j2.properties").write_text(_LOG4J2)
        (directory / "data" / "myid").write_text(f"{number}\n")
    except OSError as error:
        raise ZooKeeperStartError(
            f"{directory} cannot hold the server's data: {error.strerror}; give a folder that can be written"
        ) from error


def become_member(
    number: int, hosts: Sequence[str], directory: Path, certificates: Path | None = None
) -> NoReturn:
    """Be a server of the ensemble from now on; returns only by ZooKeeperStartError."""
    java = find_java()
    prepare_member(number, hosts, directory, certificates)
    command = server_command(java, ensemble=len(hosts) > 1, tls=certificates is not None)
    os.chdir(directory)
    os.execv(command[0], command)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
