"""The conditions of links in the words of `tc netem`, and whether the kernel has it.

Where the traffic of a site enters the WAN there is a device with a class per other site, a netem in each,
and a filter per host by its address (`topology.netem_wan` makes the devices):

    htb root ── 1:1 ── netem 11: delay and loss towards the first site ── tbf: its rate
             └─ 1:2 ── netem 12: ... towards the second
             └─ 1:999 everything else, untouched

Netem has rates of its own, but its queue counts packets, whatever their size: enough for 200 ms of large ones
it drops small ones after a few milliseconds. The queue of tbf counts bytes.

What differs from the ferry (`topology.lane`): with jitter packets may overtake each other, a packet that
finds nothing before it takes no time for its own length, losses are not those of a seed, and nobody says when
the kernel was late. What is the same is checked by the same calibration.
"""

import shutil
import subprocess
import threading
from collections.abc import Iterable, Mapping
from typing import Final

from overlay.limits import SECOND_NS
from topology.conditions import LinkConditions
from topology.errors import DriverError
from topology.lane import QUEUE_MAX_NS
from topology.namespaces import enter_new

TC_TIMEOUT_S: Final = 10.0
FULL_SPEED: Final = "10gbit"
"""What a class may carry; the rate of a link is netem's business."""
QUANTUM_BYTES: Final = 60_000
"""What a class may send in its turn; named because the kernel complains of what follows from the speed."""
REST: Final = 999
"""The class of what goes to no other site."""
PACKETS_MAX: Final = 100_000
"""On the way at a time: netem drops the tail of a shorter queue."""
PACKET_BYTES: Final = 1_600
"""No packet is longer. A rate must allow one at once."""
BURST_S: Final = 0.002
"""By how much the kernel's timers may be late before a rate is not reached."""
MBIT_BYTES: Final = 125_000
ETHERNET_BYTES: Final = 14
"""Queues count them; rates of links are those of IP packets."""


def netem_words(conditions: LinkConditions, *, cut: bool = False) -> list[str]:
    """Delay and loss of one direction, as `tc qdisc ... netem` wants them; what was said before goes."""
    words = ["limit", str(PACKETS_MAX)]
    if conditions.delay_ms or conditions.jitter_ms:
        words += ["delay", f"{conditions.delay_ms:g}ms"]
        if conditions.jitter_ms:
            # Uniform: netem's distribution if none is named.
            words.append(f"{conditions.jitter_ms:g}ms")
    if cut:
        words += ["loss", "100%"]
    elif conditions.loss:
        words += _loss_words(conditions)
    return words


def rate_words(rate_mbit: float) -> list[str]:
    """A rate and the queue before it, as `tc qdisc ... tbf` wants it."""
    bytes_per_s = rate_mbit * MBIT_BYTES
    burst = max(PACKET_BYTES, round(bytes_per_s * BURST_S))
    limit = max(PACKET_BYTES, round(bytes_per_s * QUEUE_MAX_NS / SECOND_NS))
    return ["rate", f"{rate_mbit:g}mbit", "burst", str(burst), "limit", str(limit)]


def _loss_words(conditions: LinkConditions) -> list[str]:
    if conditions.burst is None:
        return ["loss", f"{100 * conditions.loss:g}%"]
    enter, leave = conditions.enter_burst_probability, conditions.leave_burst_probability
    return ["loss", "gemodel", f"{100 * enter:g}%", f"{100 * leave:g}%"]


def set_up_lines(device: str, lanes: Mapping[int, LinkConditions]) -> list[str]:
    """For `tc -batch`: a class with its conditions per site, by the sites' numbers. Hosts come later."""
    lines = [
        f"qdisc replace dev {device} root handle 1: stab overhead -{ETHERNET_BYTES} htb default {REST}",
        _class_line(device, REST),
    ]
    for number, conditions in lanes.items():
        lines += [_class_line(device, number), *change_lines(device, number, conditions)]
    return lines


def change_lines(device: str, number: int, conditions: LinkConditions, *, cut: bool = False) -> list[str]:
    """For `tc -batch`: new conditions towards the site of this number, counted from 1."""
    words = " ".join(netem_words(conditions, cut=cut))
    # A handle for each kind: the kernel replaces no queue with another kind of the same handle.
    if conditions.rate_mbit is None:
        queue = f"handle {1_000 + number}: pfifo limit {PACKETS_MAX}"
    else:
        queue = f"handle {2_000 + number}: tbf {' '.join(rate_words(conditions.rate_mbit))}"
    return [
        f"qdisc replace dev {device} parent 1:{number} handle {10 + number}: netem {words}",
        f"qdisc replace dev {device} parent {10 + number}:1 {queue}",
    ]


def host_line(device: str, host: int, address: str, number: int) -> str:
    """For `tc -batch`: what goes to this host, which has a number of its own, is for the site's class."""
    return (
        f"filter add dev {device} parent 1: protocol ip pref {host} u32 "
        f"match ip dst {address}/32 flowid 1:{number}"
    )


def forget_line(device: str, host: int) -> str:
    """For `tc -batch`: there is no such host any more."""
    return f"filter del dev {device} parent 1: pref {host}"


def _class_line(device: str, number: int) -> str:
    return (
        f"class replace dev {device} parent 1: classid 1:{number} "
        f"htb rate {FULL_SPEED} quantum {QUANTUM_BYTES}"
    )


def run_tc(*arguments: str, batch: Iterable[str] = ()) -> str:
    """Run `tc`; with `batch`, these commands at once. Raises DriverError with what `tc` says."""
    lines = list(batch)
    command = ["tc", *arguments, *(("-batch", "-") if lines else ())]
    try:
        done = subprocess.run(
            command,
            input="\n".join(lines),
            capture_output=True,
            text=True,
            timeout=TC_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DriverError(f"{' '.join(command)} did not work: {error}") from error
    if done.returncode:
        raise DriverError(f"{' '.join(command)} failed: {' '.join(done.stderr.split()) or done.returncode}")
    return done.stdout


def why_no_netem() -> str | None:
    """Why links cannot be made of netem here, tried in a namespace that goes at once; None if they can."""
    if shutil.which("tc") is None:
        return "the command tc is missing: install iproute2"
    found: list[str | None] = []

    def try_it() -> None:
        # The thread ends with its namespace; no other thread is moved.
        try:
            enter_new()
            lines = set_up_lines("lo", {1: LinkConditions(10, 1, 0.02, 4, 10)})
            run_tc(batch=[*lines, host_line("lo", 1, "198.18.1.10", 1)])
        except DriverError as error:
            found.append(f"the kernel has no sch_netem, sch_tbf, sch_htb or cls_u32 ({error})")
        else:
            found.append(None)

    thread = threading.Thread(target=try_it)
    thread.start()
    thread.join()
    return found[0]
