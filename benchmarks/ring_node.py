"""One process of the ring of `isthmus bench ring`: a node, or the WAN between all nodes.

    python -m benchmarks.ring_node node NUMBER OFFSET_NS PPM
    python -m benchmarks.ring_node wan REGION SEED

A node has a hub as brokers have, with a clock of its own: the host's, moved by an offset and a drift.
It passes every publication on to the next node; the one that published it tells the bounds and the
truth, which it can because underneath all clocks are one. The WAN is one relay per link whose delays
change all the time. Both are told what to do on standard input (`topology.lines`).
"""

import asyncio
import random
import sys
import time
from struct import Struct
from typing import Final

from benchmarks.ring_regions import CHANGE_EVERY_S, DRIFT_PPM, REGIONS, Region
from overlay.batch import Run, decode_batch_header, decode_messages, encode_message
from overlay.delay import add_shifts, age_bound_ns
from overlay.equations import Helper, total_ns, upper_bound_ns
from overlay.errors import CloseReason
from overlay.limits import MILLISECOND_NS
from overlay.locator import Locator
from overlay.messages import UNKNOWN_CLOCK_SHIFT, ControlMessage, Hello, Role, Welcome
from runtime.hub import Hub, Identity, Pace
from runtime.link import Link
from topology.gateway import Gateway
from topology.lines import read_commands, say

_PACE: Final = Pace(heartbeat_ns=50 * MILLISECOND_NS, silence_ns=5_000 * MILLISECOND_NS)
_PAYLOAD: Final = Struct("<Qqq")
"""The true time of birth, the unoptimised bound so far (-1: unknown), when the last node got it."""
_UNKNOWN: Final = -1


class SkewedClock:
    """The host's clock with an offset and a drift, exact to the nanosecond."""

    def __init__(self, offset_ns: int, ppm: int) -> None:
        self._offset_ns = offset_ns
        self._ppm = ppm

    def at(self, true_ns: int) -> int:
        """The reading at a time of the host's clock."""
        return self._offset_ns + true_ns + true_ns * self._ppm // 1_000_000

    def __call__(self) -> int:
        """The reading now."""
        return self.at(time.monotonic_ns())

    def true_ns(self, reading_ns: int) -> int:
        """The latest time of the host's clock at which this one read so."""
        true_ns = (reading_ns - self._offset_ns) * 1_000_000 // (1_000_000 + self._ppm)
        while self.at(true_ns + 1) <= reading_ns:
            true_ns += 1
        return true_ns


class RingNode:
    """A hub and its handler: what comes from the node before goes on to the next."""

    def __init__(self, number: int, clock: SkewedClock) -> None:
        self.clock = clock
        self._incarnation = 1_000 + number
        identity = Identity(
            Role.EDGE, f"node-{number}", self._incarnation, cluster="ring", drift_ppm=DRIFT_PPM
        )
        self.hub = Hub(identity, self, pace=_PACE, clock=clock)
        self.next = Link("next", Role.EDGE)
        self._links: dict[str, Link] = {}
        self._sequence = 0
        self.back: list[tuple[int, int, int]] = []
        """Of what came back: the truth, the bound as the overlay has it, the unoptimised one."""

    def publish(self) -> None:
        """Send a publication round the ring."""
        self._sequence += 1
        true_ns = time.monotonic_ns()
        born_ns = self.clock.at(true_ns)
        payload = _PAYLOAD.pack(true_ns, 0, born_ns)
        self._pass_on(self._incarnation, 0, self._sequence, born_ns, payload, born_ns)

    def on_data(self, link: Link, body: bytes, now_ns: int) -> None:
        header = decode_batch_header(body)
        shift_ns = add_shifts(header.clock_shift_ns, link.clock.shift_at(now_ns))
        for message in decode_messages(body):
            true_born_ns, so_far_ns, last_in_ns = _PAYLOAD.unpack(message.payload)
            if so_far_ns != _UNKNOWN:
                so_far_ns = self._unoptimised_ns(link, so_far_ns, header.sent_ns, last_in_ns, now_ns)
            if header.origin == self._incarnation:
                if shift_ns != UNKNOWN_CLOCK_SHIFT and so_far_ns != _UNKNOWN:
                    bound_ns = age_bound_ns(now_ns - message.born_ns + shift_ns, DRIFT_PPM)
                    self.back.append((self.clock.true_ns(now_ns) - true_born_ns, bound_ns, so_far_ns))
                continue
            payload = _PAYLOAD.pack(true_born_ns, so_far_ns, now_ns)
            self._pass_on(header.origin, shift_ns, message.sequence, message.born_ns, payload, now_ns)

    @staticmethod
    def _unoptimised_ns(link: Link, so_far_ns: int, sent_ns: int, last_in_ns: int, now_ns: int) -> int:
        """Equation 1 with the latest helper, added up by equation 7."""
        clock = link.clock
        if clock.latest_sent_ns < 0:
            return _UNKNOWN
        helper = Helper(clock.latest_sent_ns, clock.latest_received_ns)
        crossed_ns = upper_bound_ns(helper, sent_ns, now_ns, DRIFT_PPM)
        return so_far_ns + total_ns([crossed_ns], [sent_ns - last_in_ns], DRIFT_PPM)

    def _pass_on(
        self, origin: int, shift_ns: int, sequence: int, born_ns: int, payload: bytes, now_ns: int
    ) -> None:
        run = Run(1, encode_message(1, origin, sequence, born_ns, payload))
        self.next.outbox.append(0, 0, origin, shift_ns, run, now_ns)
        self.next.flush_soon()

    def admit(self, hello: Hello) -> tuple[Link, Welcome]:
        link = self._links.setdefault(hello.node, Link(hello.node, hello.role))
        identity = self.hub.identity
        return link, Welcome(identity.role, identity.node, identity.incarnation, cluster=identity.cluster)

    def on_welcome(self, link: Link, welcome: Welcome) -> None:
        pass

    def on_link_up(self, link: Link) -> None:
        say("up", peer=link.peer)

    def on_link_down(self, link: Link, reason: CloseReason, detail: str) -> None:
        say("down", peer=link.peer, reason=str(reason))

    def on_control(self, link: Link, message: ControlMessage) -> None:
        pass


async def run_node(number: int, clock: SkewedClock) -> None:
    """Serve until the benchmark is gone."""
    node = RingNode(number, clock)
    say("serving", locator=str(await node.hub.listen("127.0.0.1", 0)))
    publishing: asyncio.Task[None] | None = None
    async for command in read_commands():
        if command["command"] == "join":
            node.hub.dial(node.next, Locator.parse(command["locator"]))
        elif command["command"] == "publish":
            publishing = asyncio.create_task(_publish(node, command["count"], command["every_s"]))
        elif command["command"] == "results":
            say("results", back=node.back)
    if publishing is not None:
        publishing.cancel()
    await node.hub.close()


async def _publish(node: RingNode, count: int, every_s: float) -> None:
    for _ in range(count):
        node.publish()
        await asyncio.sleep(every_s)
    say("published", count=count)


async def run_wan(region: Region, seed: int) -> None:
    """Relay between nodes until the benchmark is gone."""
    randomness = random.Random(f"{seed} {region.name}")
    gateways: list[tuple[Gateway, float, float]] = []
    changing: asyncio.Task[None] | None = None
    async for command in read_commands():
        assert command["command"] == "serve"
        locators = []
        for target in command["targets"]:
            ways_ms = randomness.uniform(*region.base_ms), randomness.uniform(*region.base_ms)
            gateway = Gateway(*ways_ms, target=Locator.parse(target))
            locators.append(str(await gateway.start("127.0.0.1")))
            gateways.append((gateway, *ways_ms))
        changing = asyncio.create_task(_change_delays(gateways, region, randomness))
        say("serve", locators=locators)
    if changing is not None:
        changing.cancel()
    await asyncio.gather(*(gateway.close() for gateway, _, _ in gateways))


async def _change_delays(
    gateways: list[tuple[Gateway, float, float]], region: Region, randomness: random.Random
) -> None:
    """What is on the way besides the way itself: always something, sometimes much."""

    def more_ms() -> float:
        spike_ms = randomness.uniform(0, region.spike_ms) if randomness.random() < region.spikes else 0.0
        return randomness.expovariate(1 / region.jitter_ms) + spike_ms

    while True:
        for gateway, out_ms, back_ms in gateways:
            gateway.set_delay(out_ms + more_ms(), back_ms + more_ms())
        await asyncio.sleep(CHANGE_EVERY_S)


def main() -> None:
    """One process."""
    if sys.argv[1] == "wan":
        region = next(region for region in REGIONS if region.name == sys.argv[2])
        asyncio.run(run_wan(region, int(sys.argv[3])))
    else:
        number, offset_ns, ppm = map(int, sys.argv[2:5])
        asyncio.run(run_node(number, SkewedClock(offset_ns, ppm)))


if __name__ == "__main__":
    main()
