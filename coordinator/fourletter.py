"""ZooKeeper's four-letter words: ask a server how it is, over a plain socket and without a session.

They answer while a server has no quorum, which is when a client library can say least.
"""

import asyncio
import socket
import time

from coordinator.errors import FourLetterError

REPLY_MAX_BYTES = 8 * 1024 * 1024
"""`wchp` and `dump` grow with watches and sessions; more than this is no server of ours."""

TIMEOUT_S = 2.0
_CHUNK_BYTES = 65536


async def four_letter(host: str, port: int, word: str, timeout_s: float = TIMEOUT_S) -> str:
    """Ask one server; raises FourLetterError if no whole answer comes within `timeout_s`."""
    request = _encode(word)
    chunks: list[bytes] = []
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(request)
                while chunk := await reader.read(_CHUNK_BYTES):
                    chunks.append(chunk)
                    _check_length(host, port, word, chunks)
            finally:
                writer.close()
    except TimeoutError:
        raise _too_late(host, port, word, timeout_s) from None
    except OSError as error:
        raise _broken(host, port, word, error) from error
    return _decode(host, port, word, chunks)


def four_letter_sync(host: str, port: int, word: str, timeout_s: float = TIMEOUT_S) -> str:
    """Ask as `four_letter` does, for callers without an event loop."""
    request = _encode(word)
    chunks: list[bytes] = []
    deadline_s = time.monotonic() + timeout_s
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as connection:
            connection.sendall(request)
            while True:
                remaining_s = deadline_s - time.monotonic()
                if remaining_s <= 0:
                    raise TimeoutError
                connection.settimeout(remaining_s)
                chunk = connection.recv(_CHUNK_BYTES)
                if not chunk:
                    break
                chunks.append(chunk)
                _check_length(host, port, word, chunks)
    except TimeoutError:
        raise _too_late(host, port, word, timeout_s) from None
    except OSError as error:
        raise _broken(host, port, word, error) from error
    return _decode(host, port, word, chunks)


def parse_fields(text: str, separator: str) -> dict[str, str]:
    """Split an answer of one `name<separator>value` per line; lines of another form are headings."""
    pairs = (line.partition(separator) for line in text.splitlines())
    return {name.strip(): value.strip() for name, found, value in pairs if found}


def parse_mntr(text: str) -> dict[str, float | str]:
    """Read the answer to `mntr`: numbers as float, the rest (version, server state) as text.

    Raises FourLetterError on the sentence a server without a quorum answers instead.
    """
    fields = parse_fields(text, "\t")
    if not fields:
        raise FourLetterError(
            f"mntr answered {text.strip()[:200]!r}, no statistics: the server is not serving"
        )
    return {name: _number(value) for name, value in fields.items()}


def _number(value: str) -> float | str:
    try:
        return float(value)
    except ValueError:
        return value


def _encode(word: str) -> bytes:
    if len(word) != 4 or not word.isascii() or not word.isalpha():
        raise FourLetterError(f"{word!r} is no four-letter word: use one such as ruok, srvr or mntr")
    return word.encode()


def _decode(host: str, port: int, word: str, chunks: list[bytes]) -> str:
    text = b"".join(chunks).decode(errors="replace")
    if not text:
        raise FourLetterError(
            f"{host}:{port} closed without an answer to {word}: it is starting, or no ZooKeeper"
        )
    if text.startswith(f"{word} is not executed"):
        raise FourLetterError(
            f"{host}:{port} refuses {word}: add it to 4lw.commands.whitelist in the server's configuration"
        )
    return text


def _check_length(host: str, port: int, word: str, chunks: list[bytes]) -> None:
    length = sum(map(len, chunks))
    if length > REPLY_MAX_BYTES:
        raise FourLetterError(
            f"{host}:{port} answered {word} with {length} bytes, at most {REPLY_MAX_BYTES} are read: "
            "is this a ZooKeeper server?"
        )


def _too_late(host: str, port: int, word: str, timeout_s: float) -> FourLetterError:
    return FourLetterError(
        f"{host}:{port} gave no whole answer to {word} within {timeout_s:g} s: is the server alive?"
    )


def _broken(host: str, port: int, word: str, error: OSError) -> FourLetterError:
    return FourLetterError(f"{host}:{port} cannot be asked {word} ({error}): is the server running?")
