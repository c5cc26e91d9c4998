"""Where a node listens: `host:port`, with IPv6 hosts in brackets."""

from typing import NamedTuple, Self

from overlay.errors import InvalidNameError, show


class Locator(NamedTuple):
    """A host and a TCP port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `host:port`; raises InvalidNameError on anything else."""
        host, separator, port = text.strip().rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            separator = ""
        usable_host = bool(host) and host.isprintable() and " " not in host
        usable_port = port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536
        if not (separator and usable_host and usable_port):
            raise InvalidNameError(
                f"address {show(text)} cannot be used: give host:port with a port from 1 to 65535, "
                "for example 10.0.0.7:7400 or [::1]:7400"
            )
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
