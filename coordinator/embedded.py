"""A real ZooKeeper as a child process: one server, or an ensemble of three, on this machine.

The `pyspark` wheel ships ZooKeeper and all it needs, so tests, drills and `isthmus demo` run against the real
server and nobody has to install one. It is for one machine: all members share its fate, its disk and its
power plug.

`start` writes each member's configuration into its own folder, starts it behind a guard
(`coordinator._child`) so that no server outlives us, and returns when every member says that it serves.
Files on disk:

    <directory>/owner                 locked while we live; a free lock marks leftovers of a killed process
    <directory>/server-1/zoo.cfg      and log4j2.properties, server.log, console.log, data/
"""

import atexit
import fcntl
import importlib.util
import os
import random
import re
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from coordinator._child import GuardedProcess
from coordinator.errors import FourLetterError, ZooKeeperStartError
from coordinator.fourletter import four_letter_sync, parse_fields
from coordinator.java import Java, find_java
from runtime.tls import AUTHORITY_FILE, ZOOKEEPER_FILES

TICK_MS = 500
SESSION_TIMEOUT_MIN_MS = 1_000
SESSION_TIMEOUT_MAX_MS = 60_000
CLIENT_CONNECTIONS_MAX = 2_000
"""Per address. On loopback every node of a testbed shares one address; the default of 60 is soon used up."""
COMMANDS = ("cons", "envi", "mntr", "ruok", "srst", "srvr")
"""Four-letter words that a server answers, to anybody: none of them tells the names of znodes."""
HEAP_MAX_MIB = 256
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 5.0
PORT_ATTEMPTS = 5
"""How often new ports are tried when somebody takes one between our choice and the server's bind."""
POLL_INTERVAL_S = 0.02
PROBE_TIMEOUT_S = 1.0
FIRST_PORT = 12_000
LOG_TAIL_LINES = 20
LOG_TAIL_MAX_BYTES = 256 * 1024

DIRECTORY_PREFIX = "isthmus-zookeeper-"
OWNER_FILE = "owner"

JARS = (
    *("zookeeper", "zookeeper-jute", "metrics-core", "snappy-java"),
    *("slf4j-api", "log4j-api", "log4j-core", "log4j-slf4j2-impl"),
)
"""All the server loads of the more than 200 jars that Spark ships; opening the others only costs time."""
TLS_JARS = (
    *("netty-buffer", "netty-codec", "netty-codec-base", "netty-common", "netty-handler", "netty-resolver"),
    *("netty-transport", "netty-transport-classes-epoll", "netty-transport-native-unix-common"),
)
"""What it loads besides to encrypt connections."""

_PORT_TAKEN = "Address already in use"
_SERVING_MODES = ("standalone", "leader", "follower")

# Bounded, because a testbed may run for days: 8 MiB, and as much again for the previous file.
_LOG4J2 = """\
status = error
appender.file.type = RollingFile
appender.file.name = file
appender.file.fileName = ./server.log
appender.file.filePattern = ./server.log.%i
appender.file.policies.type = SizeBasedTriggeringPolicy
appender.file.policies.size = 8MB
appender.file.strategy.type = DefaultRolloverStrategy
appender.file.strategy.max = 1
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %d{ISO8601} %-5p %c{1} - %m%n
rootLogger.level = info
rootLogger.appenderRef.file.ref = file
"""


@dataclass(frozen=True, slots=True)
class Member:
    """One server of the ensemble, as it is now."""

    index: int
    pid: int
    client_port: int
    log_path: Path
    alive: bool


@dataclass(frozen=True, slots=True)
class _Ports:
    client: int
    quorum: int
    election: int
    secure: int


class _PortTakenError(Exception):
    """A server could not bind; other ports may do."""


def class_path(*, tls: bool = False) -> str:
    """The jars of the server, from pyspark's folder; pyspark itself is not imported, that takes long."""
    spec = importlib.util.find_spec("pyspark")
    if spec is None or not spec.submodule_search_locations:
        raise ZooKeeperStartError(
            "the package pyspark, which brings the ZooKeeper server, is not installed: "
            "run pip install isthmus, or use an existing ensemble with --zookeeper host:port"
        )
    folder = Path(spec.submodule_search_locations[0]) / "jars"
    # The version begins with a digit: that tells zookeeper-3.9.5.jar from zookeeper-jute-3.9.5.jar.
    names = (*JARS, *TLS_JARS) if tls else JARS
    found = {name: sorted(folder.glob(f"{name}-[0-9]*.jar")) for name in names}
    missing = [name for name, jars in found.items() if not jars]
    if missing:
        raise ZooKeeperStartError(
            f"{folder} has no jar of {', '.join(missing)}: "
            "run pip install --force-reinstall 'pyspark>=4.0,<5'"
        )
    return os.pathsep.join(str(jars[-1]) for jars in found.values())


def server_command(
    java: Java, *, ensemble: bool, options: Sequence[str] = (), tls: bool = False
) -> list[str]:
    """How to start a server in a folder with `zoo.cfg` and `log4j2.properties`."""
    main = "quorum.QuorumPeerMain" if ensemble else "ZooKeeperServerMain"
    return [
        str(java.executable),
        f"-Xmx{HEAP_MAX_MIB}m",
        # A small server on a busy machine: start soon and use one thread for collecting.
        *("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData", "-XX:+ExitOnOutOfMemoryError"),
        "-Dlog4j2.configurationFile=./log4j2.properties",
        *options,
        *("-cp", class_path(tls=tls)),
        f"org.apache.zookeeper.server.{main}",
        "./zoo.cfg",
    ]


def server_settings(host: str, client_port: int, peers: Sequence[str], tick_ms: int, force_sync: bool) -> str:
    """A server's zoo.cfg; `peers` are `host:quorum port:election port`, none for a server on its own.

    Paths are relative to its folder, so that nothing in them needs an escape.
    """
    lines = [
        "dataDir=./data",
        f"clientPort={client_port}",
        f"clientPortAddress={host}",
        f"tickTime={tick_ms}",
        f"minSessionTimeout={SESSION_TIMEOUT_MIN_MS}",
        f"maxSessionTimeout={SESSION_TIMEOUT_MAX_MS}",
        f"maxClientCnxns={CLIENT_CONNECTIONS_MAX}",
        "admin.enableServer=false",
        f"4lw.commands.whitelist={','.join(COMMANDS)}",
        f"forceSync={'yes' if force_sync else 'no'}",
        # In KiB. The default of 64 MiB per log file is written out in zeros before the first request.
        "preAllocSize=1024",
        "snapCount=50000",
        "autopurge.snapRetainCount=3",
        "autopurge.purgeInterval=1",
    ]
    if peers:
        # In ticks: a member has 10 s to fetch the state, and falls out after 2 s of silence.
        lines += [f"initLimit={max(2, 10_000 // tick_ms)}", f"syncLimit={max(2, 2_000 // tick_ms)}"]
        lines += [f"server.{number}={peer}" for number, peer in enumerate(peers, 1)]
    return "\n".join(lines) + "\n"


def tls_settings(host: str, secure_port: int, *, ensemble: bool) -> str:
    """Lines of zoo.cfg for an encrypted port, and encryption between the servers of an ensemble.

    `write_tls_files` puts what they name into the server's folder.
    """
    lines = [
        "serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory",
        f"secureClientPort={secure_port}",
        f"secureClientPortAddress={host}",
        "ssl.keyStore.location=./keystore.pem",
        "ssl.keyStore.type=PEM",
        "ssl.trustStore.location=./authority.pem",
        "ssl.trustStore.type=PEM",
        "ssl.clientAuth=need",
        "ssl.protocol=TLSv1.3",
        "ssl.enabledProtocols=TLSv1.3",
    ]
    if ensemble:
        lines += [
            "sslQuorum=true",
            "ssl.quorum.keyStore.location=./keystore.pem",
            "ssl.quorum.keyStore.type=PEM",
            "ssl.quorum.trustStore.location=./authority.pem",
            "ssl.quorum.trustStore.type=PEM",
            "ssl.quorum.protocol=TLSv1.3",
            "ssl.quorum.enabledProtocols=TLSv1.3",
        ]
    return "\n".join(lines) + "\n"


def write_tls_files(certificates: Path, folder: Path) -> None:
    """Put the servers' certificate, key and authority where `tls_settings` says."""
    try:
        authority = (certificates / AUTHORITY_FILE).read_bytes()
        pair = [(certificates / f"{ZOOKEEPER_FILES}.{ending}").read_bytes() for ending in ("key", "pem")]
    except OSError as error:
        raise ZooKeeperStartError(
            f"{error.filename}: {error.strerror}: make it with `isthmus certs zookeeper {certificates} HOST`"
        ) from error
    (folder / "authority.pem").write_bytes(authority)
    keystore = folder / "keystore.pem"
    keystore.touch(mode=0o600)
    keystore.write_bytes(b"".join(pair))


def free_ports(host: str, count: int) -> list[int]:
    """Choose free TCP ports below the range that the kernel gives to outgoing connections.

    A port of that range may be given away while a killed member waits for its restart; worse, a client that
    keeps calling the dead port may be given this very port as its own, and then TCP connects it to itself.
    """
    held: list[socket.socket] = []
    try:
        candidates = list(range(FIRST_PORT, max(FIRST_PORT, _first_outgoing_port())))
        random.shuffle(candidates)
        for port in [*candidates, *[0] * count]:
            if len(held) == count:
                break
            listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            try:
                listener.bind((host, port))
            except OSError:
                listener.close()
                continue
            held.append(listener)
        ports = [listener.getsockname()[1] for listener in held]
    finally:
        for listener in held:
            listener.close()
    if len(ports) < count:
        raise ZooKeeperStartError(
            f"only {len(ports)} of {count} ports can be bound on {host}: is it an address of this machine?"
        )
    return ports


def _first_outgoing_port() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32_768


def _claim(directory: Path) -> IO[str]:
    """Lock a directory for this process; the kernel frees the lock when we die, however we die."""
    # Locked before it gets its name, so that nobody sees an owner file without a lock.
    draft = directory / f".{OWNER_FILE}-{secrets.token_hex(4)}"
    owner = directory / OWNER_FILE
    file = draft.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.write(f"{os.getpid()}\n")
        file.flush()
        if owner.exists() and not _is_abandoned(owner):
            raise ZooKeeperStartError(
                f"{directory} is in use by process {owner.read_text().strip()}: choose another directory"
            )
        draft.replace(owner)
    except BaseException:
        draft.unlink(missing_ok=True)
        file.close()
        raise
    return file


def _is_abandoned(owner: Path) -> bool:
    with owner.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def sweep() -> list[Path]:
    """Remove private directories whose owner was killed before it could; give what was removed.

    A lock tells the dead from the living, not a pid: pids are reused, and processes of another container
    that share the temporary folder have pids that mean nothing here.
    """
    removed = []
    for directory in Path(tempfile.gettempdir()).glob(f"{DIRECTORY_PREFIX}*"):
        owner = directory / OWNER_FILE
        try:
            ours = not directory.is_symlink() and directory.lstat().st_uid == os.getuid()
            abandoned = ours and owner.is_file() and not owner.is_symlink() and _is_abandoned(owner)
        except OSError:
            # Its owner, or another sweep, removed it under our eyes.
            continue
        if abandoned:
            shutil.rmtree(directory, ignore_errors=True)
            removed.append(directory)
    return removed


class _Server:
    """One member: its folder, its ports, and its process while it runs."""

    def __init__(self, index: int, folder: Path, host: str, ports: _Ports) -> None:
        self.index = index
        self.folder = folder
        self.host = host
        self.ports = ports
        self.process: GuardedProcess | None = None
        self.token = ""

    @property
    def log_path(self) -> Path:
        return self.folder / "server.log"

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.alive

    def launch(self, java: Java, ensemble: bool, tls: bool) -> None:
        # A log of an earlier life must not be read as news of this one.
        for name in ("server.log", "console.log"):
            path = self.folder / name
            if path.exists():
                path.replace(self.folder / f"{name}.previous")
        self.token = f"isthmus-{secrets.token_hex(8)}"
        # The word `envi` repeats the user's name: see `is_serving`.
        command = server_command(java, ensemble=ensemble, options=[f"-Duser.name={self.token}"], tls=tls)
        self.process = GuardedProcess(command, self.folder, self.folder / "console.log")

    def is_serving(self) -> bool:
        """Whether this member, and not a stranger on its port, accepts requests."""
        try:
            if self._ask("ruok") != "imok" or self.mode() not in _SERVING_MODES:
                return False
            # If another server took the port first, it would answer all the same: the token is only ours.
            return parse_fields(self._ask("envi"), "=").get("user.name") == self.token
        except FourLetterError:
            return False

    def mode(self) -> str:
        """What part it plays; empty if it does not say."""
        try:
            return parse_fields(self._ask("srvr"), ": ").get("Mode", "")
        except FourLetterError:
            return ""

    def _ask(self, word: str) -> str:
        return four_letter_sync(self.host, self.ports.client, word, PROBE_TIMEOUT_S)

    def tail(self, lines: int) -> list[str]:
        """The last lines of what the server logged, then of what the JVM printed beside the log."""
        return [*_last_lines(self.folder / "console.log", lines), *_last_lines(self.log_path, lines)][-lines:]

    def end(self, timeout_s: float) -> None:
        if self.process is not None and not self.process.wait(timeout_s):
            self.process.kill()


def _last_lines(path: Path, lines: int) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_TAIL_MAX_BYTES))
            return file.read().decode(errors="replace").splitlines()[-lines:]
    except FileNotFoundError:
        return []


class EmbeddedZooKeeper:
    """One ZooKeeper server, or three as an ensemble, for as long as this object is started.

    Not for use from several threads at once. The thread that starts it may end; the servers stay.

    `directory` keeps the data across restarts; without it a private one is made, and removed by `stop`.
    `force_sync` makes servers wait for the disk at each write. By default they do so only in a directory that
    is kept: a crash of the server or of this process loses nothing either way, a power cut would, and what is
    private is gone after one in any case. Without it, a slow disk cannot expire sessions in tests and drills.
    `certificates` is a folder with a certificate for ZooKeeper: then there is an encrypted port too, which
    takes nobody without a certificate.
    """

    def __init__(
        self,
        servers: int = 1,
        directory: Path | None = None,
        *,
        tick_ms: int = TICK_MS,
        host: str = "127.0.0.1",
        client_ports: Sequence[int] | None = None,
        java: Java | None = None,
        force_sync: bool | None = None,
        certificates: Path | None = None,
    ) -> None:
        if servers not in (1, 3):
            raise ZooKeeperStartError(
                f"servers is {servers}: use 1, or 3 for an ensemble that survives one crash"
            )
        if tick_ms < 1:
            raise ZooKeeperStartError(f"tick_ms is {tick_ms}: it must be above 0")
        if client_ports is not None and len(client_ports) != servers:
            raise ZooKeeperStartError(
                f"client_ports has {len(client_ports)} ports for {servers} servers: give as many"
            )
        self._count = servers
        self._wanted_directory = directory
        self._tick_ms = tick_ms
        self._host = host
        self._client_ports = None if client_ports is None else tuple(client_ports)
        self._java = java
        self._force_sync = directory is not None if force_sync is None else force_sync
        self._certificates = certificates
        self._directory: Path | None = None
        self._owner: IO[str] | None = None
        self._servers: list[_Server] = []
        self._owner_pid = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def hosts(self) -> str:
        """The connection string for clients: every member, also one that is down."""
        self._require_started()
        return ",".join(f"{self._bracketed_host}:{server.ports.client}" for server in self._servers)

    @property
    def secure_hosts(self) -> str:
        """The connection string for clients that encrypt; only with `certificates`."""
        self._require_started()
        assert self._certificates is not None
        return ",".join(f"{self._bracketed_host}:{server.ports.secure}" for server in self._servers)

    @property
    def directory(self) -> Path:
        """Where the members keep their data and logs."""
        self._require_started()
        assert self._directory is not None
        return self._directory

    @property
    def members(self) -> list[Member]:
        """Every member and whether it is alive; empty before `start` and after `stop`."""
        return [
            Member(
                index=server.index,
                pid=server.process.pid if server.process is not None else 0,
                client_port=server.ports.client,
                log_path=server.log_path,
                alive=server.alive,
            )
            for server in self._servers
        ]

    def start(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Start every member and wait until all of them serve; raises ZooKeeperStartError if they do not."""
        if self._servers:
            raise ZooKeeperStartError(f"ZooKeeper already runs at {self.hosts}: call stop() first")
        deadline_s = time.monotonic() + timeout_s
        java = self._java = self._java or find_java()
        sweep()
        self._owner_pid = os.getpid()
        atexit.register(self.stop)
        try:
            self._open_directory()
            for _ in range(PORT_ATTEMPTS):
                self._prepare()
                try:
                    for server in self._servers:
                        server.launch(java, self._count > 1, self._certificates is not None)
                    self._wait_until_serving(self._servers, deadline_s, timeout_s)
                except _PortTakenError as error:
                    failure = error
                    for server in self._servers:
                        server.end(0)
                else:
                    return
                if self._client_ports is not None:
                    break
            raise ZooKeeperStartError(f"{failure}: end the process that uses it, or give other client_ports")
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End every member, remove the directory if it is private. Does nothing when not started."""
        if os.getpid() != self._owner_pid:
            # A forked child runs our exit handlers at its own end; the servers are not its to stop.
            return
        for server in self._servers:
            if server.process is not None:
                server.process.terminate()
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        for server in self._servers:
            server.end(max(0.0, deadline_s - time.monotonic()))
        self._servers = []
        if self._directory is not None and self._wanted_directory is None:
            shutil.rmtree(self._directory, ignore_errors=True)
        if self._owner is not None:
            self._owner.close()
        self._directory = self._owner = None
        atexit.unregister(self.stop)

    def kill_member(self, index: int) -> None:
        """End one member as a crash would, with SIGKILL; returns when it is gone."""
        server = self._server(index)
        if server.process is not None:
            server.process.kill()

    def launch_member(self, index: int) -> None:
        """Start a dead member again on its ports and data; it serves once there is a quorum."""
        server = self._server(index)
        if server.alive:
            raise ZooKeeperStartError(f"member {index} is alive: call kill_member({index}) first")
        assert self._java is not None
        server.launch(self._java, self._count > 1, self._certificates is not None)

    def leads(self, index: int) -> bool:
        """Whether a member leads the ensemble, or is the only one."""
        return self._server(index).mode() in ("leader", "standalone")

    def restart_member(self, index: int, timeout_s: float = START_TIMEOUT_S) -> None:
        """Start a dead member again on its ports and data; returns when it serves."""
        self.launch_member(index)
        server = self._server(index)
        try:
            self._wait_until_serving([server], time.monotonic() + timeout_s, timeout_s)
        except _PortTakenError as error:
            server.end(0)
            raise ZooKeeperStartError(f"{error}: end the process that uses it") from None

    def log_tail(self, index: int, lines: int = LOG_TAIL_LINES) -> list[str]:
        """The last lines of one member's log."""
        return self._server(index).tail(lines)

    @property
    def _bracketed_host(self) -> str:
        return f"[{self._host}]" if ":" in self._host else self._host

    def _require_started(self) -> None:
        if not self._servers:
            raise ZooKeeperStartError("ZooKeeper is not started: call start() first")

    def _server(self, index: int) -> _Server:
        self._require_started()
        if not 0 <= index < len(self._servers):
            raise ZooKeeperStartError(f"there is no member {index}: use 0 to {len(self._servers) - 1}")
        return self._servers[index]

    def _open_directory(self) -> None:
        if self._wanted_directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix=DIRECTORY_PREFIX))
        else:
            self._directory = self._wanted_directory.absolute()
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._owner = _claim(self._directory)

    def _prepare(self) -> None:
        """Choose ports and write every member's folder."""
        assert self._directory is not None
        numbers = free_ports(self._host, 4 * self._count)
        clients = self._client_ports or numbers[: self._count]
        others = iter(numbers[self._count :])
        self._servers = []
        for index, client in enumerate(clients):
            folder = self._directory / f"server-{index + 1}"
            for path in (folder, folder / "data"):
                path.mkdir(mode=0o700, exist_ok=True)
            self._servers.append(
                _Server(index, folder, self._host, _Ports(client, next(others), next(others), next(others)))
            )
        for server in self._servers:
            (server.folder / "zoo.cfg").write_text(self._configuration(server))
            if self._certificates is not None:
                write_tls_files(self._certificates, server.folder)
            (server.folder / "log4j2.properties").write_text(_LOG4J2)
            (server.folder / "data" / "myid").write_text(f"{server.index + 1}\n")

    def _configuration(self, server: _Server) -> str:
        peers = [
            f"{self._bracketed_host}:{peer.ports.quorum}:{peer.ports.election}" for peer in self._servers
        ]
        settings = server_settings(
            self._host,
            server.ports.client,
            peers if self._count > 1 else [],
            self._tick_ms,
            self._force_sync,
        )
        if self._certificates is not None:
            settings += tls_settings(self._host, server.ports.secure, ensemble=self._count > 1)
        return settings

    def _wait_until_serving(self, servers: Sequence[_Server], deadline_s: float, timeout_s: float) -> None:
        pending = list(servers)
        while pending:
            for server in list(pending):
                taken = _taken_port(server)
                if taken is not None:
                    raise _PortTakenError(taken)
                if not server.alive:
                    raise self._failure(
                        server, f"ended with status {server.process and server.process.exit_status}"
                    )
                if server.is_serving():
                    pending.remove(server)
            if pending and time.monotonic() > deadline_s:
                raise self._failure(
                    pending[0],
                    f"does not serve after {timeout_s:g} s: raise timeout_s if the machine is busy",
                )
            if pending:
                time.sleep(POLL_INTERVAL_S)

    def _failure(self, server: _Server, what: str) -> ZooKeeperStartError:
        log = "\n".join(server.tail(LOG_TAIL_LINES)) or "(nothing was logged)"
        version = (
            f"Java {self._java.version} from {self._java.executable}" if self._java is not None else "no Java"
        )
        return ZooKeeperStartError(
            f"ZooKeeper member {server.index} on {self._bracketed_host}:{server.ports.client} {what}. "
            f"It ran on {version}; if that looks wrong, set JAVA_HOME. Its last log lines:\n{log}"
        )


def _taken_port(server: _Server) -> str | None:
    """What the log says about a port in use, if that is the trouble."""
    for line in server.tail(1000):
        if _PORT_TAKEN in line:
            port = re.search(r":(\d+)\b", line.split(" - ", 1)[-1])
            which = port[1] if port else str(server.ports.client)
            return f"port {which} on {server.host} is taken"
    return None
