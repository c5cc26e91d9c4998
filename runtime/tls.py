"""TLS under a connection, without I/O: bytes of the socket in, bytes for the socket out.

asyncio's TLS transport hides its socket behind buffers of its own. A broker needs the socket: to
keep little in the kernel (TCP_NOTSENT_LOWAT), to ask the kernel whether a silent peer lives
(TCP_INFO), and to read what a killed peer had still sent. So a connection keeps its plain
transport, and every byte passes through a `TlsChannel` on its way.

Whose certificate it is stands in its alternative names as `isthmus:<role>/<name>`, signed by the
overlay's own authority. Host names play no part: brokers move, and clients find edges by multicast.
A folder holds what a node needs, and may hold the certificates of several nodes:

    authority.pem                    whom to trust
    edge-plant-1.pem, .key           certificate and private key of edge broker plant-1
    router-r1.pem, .key              of routing broker r1
    client-sensors.pem, .key         of clients that are the principal sensors
"""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from overlay.errors import CloseReason, ProtocolError
from overlay.limits import TLS_HANDSHAKE_MAX_BYTES
from overlay.messages import Role
from runtime.errors import ConfigurationError

AUTHORITY_FILE: Final = "authority.pem"
ZOOKEEPER_FILES: Final = "zookeeper"
"""The servers of ZooKeeper share a certificate: zookeeper.pem and zookeeper.key."""
NAME_PREFIX: Final = "isthmus:"
_READ_BYTES: Final = 256 * 1024
_RECORD_HANDSHAKE: Final = 0x16
_RECORD_ALERT: Final = 0x15


class CertificateName(NamedTuple):
    """Whom a certificate is for."""

    role: Role
    name: str

    def __str__(self) -> str:
        return f"{NAME_PREFIX}{self.role}/{self.name}"

    @property
    def file_name(self) -> str:
        """Of its files in a folder of certificates, without the ending."""
        return f"{self.role}-{self.name}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Read an alternative name; None if it is none of ours."""
        role, separator, name = text.removeprefix(NAME_PREFIX).partition("/")
        if not (text.startswith(NAME_PREFIX) and separator and name and role in list(Role)):
            return None
        return cls(Role(role), name)


@dataclass(frozen=True, slots=True)
class Tls:
    """How a node secures its connections."""

    dialling: ssl.SSLContext
    accepting: ssl.SSLContext | None = None
    https: ssl.SSLContext | None = None
    """For what an operator asks over HTTP; whoever asks must have a certificate."""

    @classmethod
    def of_broker(cls, folder: Path, role: Role, name: str) -> Self:
        """With the certificate of a broker. Edges also take clients that have none, for those with tokens."""
        files = CertificateName(role, name).file_name
        accepting = _context(ssl.PROTOCOL_TLS_SERVER, folder, files)
        accepting.verify_mode = ssl.CERT_OPTIONAL if role is Role.EDGE else ssl.CERT_REQUIRED
        # Tickets for resuming would be sent to every client and used by none.
        accepting.num_tickets = 0
        https = _context(ssl.PROTOCOL_TLS_SERVER, folder, files)
        https.verify_mode = ssl.CERT_REQUIRED
        return cls(_dialling_context(folder, files), accepting, https)

    @classmethod
    def of_client(cls, folder: Path, principal: str = "") -> Self:
        """With a client's certificate, or, for one with a token, with none."""
        files = CertificateName(Role.CLIENT, principal).file_name if principal else ""
        return cls(_dialling_context(folder, files))

    def dial(self) -> "TlsChannel":
        """For a connection we opened."""
        return TlsChannel(self.dialling, server_side=False)

    def accept(self) -> "TlsChannel":
        """For a connection a peer opened."""
        assert self.accepting is not None
        return TlsChannel(self.accepting, server_side=True)


def _dialling_context(folder: Path, files: str) -> ssl.SSLContext:
    context = _context(ssl.PROTOCOL_TLS_CLIENT, folder, files)
    # Whom we talk to is checked against the name in the certificate during our own handshake.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def _context(protocol: int, folder: Path, files: str) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    authority = folder / AUTHORITY_FILE
    certificate, key = folder / f"{files}.pem", folder / f"{files}.key"
    for path in (authority, certificate, key) if files else (authority,):
        if not path.is_file():
            raise ConfigurationError(
                f"{path} does not exist: make it with `isthmus certs`, or say --certificates FOLDER"
            )
    try:
        context.load_verify_locations(authority)
        if files:
            context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(
            f"{folder}: {authority.name} or {files or 'no certificate'} cannot be used: {error}"
        ) from error
    return context


def speaks_tls(data: bytes) -> bool:
    """Whether the first bytes of a connection are TLS rather than a frame of ours.

    A record of TLS begins with its kind and a version, 3.1 or above. A frame begins with its length,
    which before the handshake is far too small to have a third byte.
    """
    return len(data) > 2 and data[0] in {_RECORD_HANDSHAKE, _RECORD_ALERT} and data[1] == 3 and data[2] > 0


class TlsChannel:
    """One connection's encryption. Errors of the peer are raised as ProtocolError."""

    __slots__ = ("_established", "_incoming", "_outgoing", "_tls", "_unproven_bytes")

    def __init__(self, context: ssl.SSLContext, *, server_side: bool) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._established = False
        self._unproven_bytes = 0

    @property
    def is_fresh(self) -> bool:
        """Nothing has come from the peer yet."""
        return not self._unproven_bytes

    @property
    def is_established(self) -> bool:
        """The peer has proven its certificate, or, if it need not have one, that it has none."""
        return self._established

    def start(self) -> bytes:
        """The first bytes for the socket of whoever dialled."""
        self._shake_hands()
        return self._outgoing.read()

    def take(self) -> bytes:
        """Bytes for the socket that the channel itself has to say."""
        return self._outgoing.read() if self._outgoing.pending else b""

    def decrypt(self, data: bytes) -> bytes:
        """What the peer's bytes mean; afterwards `take` may have an answer."""
        self._incoming.write(data)
        if not self._established:
            self._unproven_bytes += len(data)
            self._shake_hands()
            if not self._established:
                if self._unproven_bytes > TLS_HANDSHAKE_MAX_BYTES:
                    raise ProtocolError(
                        CloseReason.TLS_FAILED,
                        f"{self._unproven_bytes} bytes and TLS is not established, "
                        f"at most {TLS_HANDSHAKE_MAX_BYTES} are allowed",
                    )
                return b""
        parts: list[bytes] = []
        try:
            while part := self._tls.read(_READ_BYTES):
                parts.append(part)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:  # the peer writes no more; its socket will say the same
            pass
        except ssl.SSLError as error:
            raise _failed(error) from error
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def encrypt(self, data: bytes) -> bytes:
        """Bytes for the socket that mean `data`."""
        assert self._established
        view = memoryview(data)
        while view:
            view = view[self._tls.write(view) :]
        return self._outgoing.read()

    @property
    def peer(self) -> CertificateName | None:
        """Whom the peer's certificate is for; None if it has none, or a foreign one."""
        certificate: dict[str, Any] | None = self._tls.getpeercert() if self._established else None
        for kind, text in (certificate or {}).get("subjectAltName", ()):
            name = CertificateName.parse(text) if kind == "URI" else None
            if name is not None:
                return name
        return None

    def _shake_hands(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return
        except ssl.SSLError as error:
            raise _failed(error) from error
        self._established = True


def _failed(error: ssl.SSLError) -> ProtocolError:
    reason = getattr(error, "verify_message", "") or error.reason or str(error)
    return ProtocolError(
        CloseReason.TLS_FAILED,
        f"{str(reason).replace('_', ' ').lower()}: check the certificates and the authority of both sides",
    )
