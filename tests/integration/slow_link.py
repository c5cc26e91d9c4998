"""A proxy that passes a fixed number of bytes a second toward the client: a slow WAN link."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

CHUNK_S = 0.005


class SlowLink:
    """An HTTP CONNECT proxy whose downstream direction has a limited rate."""

    def __init__(self, bytes_per_s: int) -> None:
        self.bytes_per_s = bytes_per_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        request = await reader.readuntil(b"\r\n\r\n")
        host, port = request.split()[1].decode().rsplit(":", 1)
        # Small buffers, so that what the link has not passed is still in the sender's hands.
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
        upstream_reader, upstream_writer = await asyncio.open_connection(sock=sock, limit=4096)
        self._writers.append(upstream_writer)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        down = asyncio.create_task(self._slowly(upstream_reader, writer))
        up = asyncio.create_task(self._at_once(reader, upstream_writer))
        self._tasks |= {down, up}

    async def _slowly(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(max(1, int(self.bytes_per_s * CHUNK_S))):
                writer.write(data)
                await writer.drain()
                next_s = max(next_s, loop.time() - CHUNK_S) + len(data) / self.bytes_per_s
                await asyncio.sleep(max(0.0, next_s - loop.time()))
        writer.close()

    async def _at_once(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*(writer.wait_closed() for writer in self._writers), return_exceptions=True)


@contextlib.asynccontextmanager
async def slow_link(bytes_per_s: int) -> AsyncIterator[str]:
    """The address of a proxy with a slow downstream."""
    link = SlowLink(bytes_per_s)
    server = await asyncio.start_server(link.serve, "127.0.0.1", 0, limit=8192)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await link.close()
        await server.wait_closed()
