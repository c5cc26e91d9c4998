"""What a broker does in the background."""

import asyncio

import pytest

from runtime.process import every


async def test_what_is_done_regularly_is_done_again_after_an_error(caplog: pytest.LogCaptureFixture) -> None:
    calls = 0
    again = asyncio.Event()

    async def work() -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ValueError("only once")
        again.set()

    task = asyncio.create_task(every(0.001, work))
    async with asyncio.timeout(10):
        await again.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert "only once" in caplog.text
