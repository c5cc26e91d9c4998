"""A world of nodes on loopback, and the house's Hypothesis profile."""

from collections.abc import AsyncIterator

import pytest

from tests.hypothesis_profile import use_profile
from tests.runtime.nodes import Bystander, Node, World

use_profile()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with World() as world:
        yield world


@pytest.fixture
async def server(world: World) -> Node:
    return await world.node("server", listen=True)


@pytest.fixture
async def bystander(world: World, server: Node) -> Bystander:
    node = await world.node("bystander")
    found = Bystander(server, node, await world.connect(node, server))
    await found.still_works()
    server.events.clear()
    return found
