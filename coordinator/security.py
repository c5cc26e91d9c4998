"""How to reach a ZooKeeper that does not let everybody in: digest credentials, access lists, TLS.

With credentials, every znode is made readable and writable for them alone. What was made before, by
brokers without credentials, stays open: begin with an empty chroot. With TLS, the server must have a
certificate of the same authority for the host name or address it is reached by.
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Self

from coordinator.client import MakeClient
from coordinator.kazoo_client import ZooKeeperClient
from overlay.messages import Role
from runtime.config import BrokerConfig
from runtime.errors import ConfigurationError
from runtime.tls import AUTHORITY_FILE, CertificateName


@dataclass(frozen=True, slots=True)
class ZooKeeperSecurity:
    """What a client of ZooKeeper needs to be let in."""

    user: str = ""
    password: str = field(default="", repr=False)
    authority: str = ""
    """File with the authority that signed the server's certificate; without it nothing is encrypted."""
    certificate: str = ""
    key: str = ""

    @classmethod
    def load(cls, credentials: Path | None, folder: Path | None, name: CertificateName | None) -> Self:
        """From a file with `user:password`, and for TLS a folder of certificates and whose to use."""
        user = password = ""
        if credentials is not None:
            try:
                text = credentials.read_text(encoding="utf-8").strip()
            except (OSError, UnicodeError) as error:
                raise ConfigurationError(f"{credentials}: cannot be read: {error}") from error
            user, separator, password = text.partition(":")
            if not (user and separator and password) or "\n" in text:
                raise ConfigurationError(f"{credentials}: expected one line user:password")
        if folder is None:
            return cls(user, password)
        files = [folder / AUTHORITY_FILE]
        if name is not None:
            files += [folder / f"{name.file_name}.pem", folder / f"{name.file_name}.key"]
        for path in files:
            if not path.is_file():
                raise ConfigurationError(f"{path} does not exist: make it with `isthmus certs`")
        return cls(user, password, *map(str, files))

    @property
    def make_client(self) -> MakeClient:
        """Makes clients of ZooKeeper that are let in."""
        return partial(
            ZooKeeperClient,
            credentials=(self.user, self.password) if self.user else None,
            tls=(self.authority, self.certificate, self.key) if self.authority else None,
        )


def client_of(config: BrokerConfig, role: Role) -> MakeClient:
    """Makes clients of ZooKeeper as a broker's configuration says."""
    return ZooKeeperSecurity.load(
        Path(config.zookeeper_credentials) if config.zookeeper_credentials else None,
        Path(config.certificates) if config.zookeeper_tls else None,
        CertificateName(role, config.id),
    ).make_client
