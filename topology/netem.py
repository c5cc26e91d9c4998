"""The conditions of links for `tc netem`, where the kernel has it.

A host's device to the WAN gets a class per site it sends to, with a netem each, and a filter by the
site's addresses:

    htb root ── 1:1 ── netem 11: delay, loss, rate towards the first site
             └─ 1:2 ── netem 12: ... towards the second
             └─ 1:999 everything else, untouched

What differs from the ferry (`topology.lane`): with jitter and no rate packets may overtake each other,
losses are not those of a seed, and nobody says when the kernel was late. What is the same is checked by
the same calibration.
"""

import shutil
import subprocess
from collections.abc import Mapping
from typing import Final

from topology.conditions import LinkConditions
from topology.errors import DriverError
from topology.lane import QUEUE_MAX_NS

TC_TIMEOUT_S: Final = 10.0
FULL_SPEED: Final = "10gbit"
"""What a class may carry; the rate of a link is netem's business."""
REST: Final = 999
"""The class of what goes to no other site."""
PACKETS_MAX: Final = 100_000
"""On the way at a time without a rate: netem drops the tail of a shorter queue."""
PACKET_BYTES: Final = 1_500
MBIT_BYTES: Final = 125_000


def netem_words(conditions: LinkConditions, *, cut: bool = False) -> list[str]:
    """One direction, as `tc qdisc ... netem` wants it."""
    words = ["limit", str(_limit_packets(conditions))]
    if conditions.delay_ms or conditions.jitter_ms:
        words += ["delay", f"{conditions.delay_ms:g}ms"]
        if conditions.jitter_ms:
            # Uniform: netem's distribution if none is named.
            words.append(f"{conditions.jitter_ms:g}ms")
    if cut:
        words += ["loss", "100%"]
    elif conditions.loss:
        words += _loss_words(conditions.loss, conditions.burst)
    if conditions.rate_mbit is not None:
        words += ["rate", f"{conditions.rate_mbit:g}mbit"]
    return words


def _loss_words(loss: float, burst: float | None) -> list[str]:
    if burst is None or burst <= 1:
        return ["loss", f"{100 * loss:g}%"]
    # Gilbert's model: from bad to good with 1/burst, from good to bad so that the share of bad is the loss.
    recover = 1 / burst
    worsen = loss * recover / (1 - loss)
    return ["loss", "gemodel", f"{100 * worsen:g}%", f"{100 * recover:g}%"]


def _limit_packets(conditions: LinkConditions) -> int:
    if conditions.rate_mbit is None:
        return PACKETS_MAX
    # What waits for its turn, as the ferry has it, and what is under way.
    seconds = QUEUE_MAX_NS / 1e9 + (conditions.delay_ms + conditions.jitter_ms) / 1e3
    return max(1, round(seconds * conditions.rate_mbit * MBIT_BYTES / PACKET_BYTES))


def set_up_lines(device: str, lanes: Mapping[str, LinkConditions]) -> list[str]:
    """For `tc -batch`: make a device treat each network, by its addresses, as its conditions say."""
    lines = [f"qdisc replace dev {device} root handle 1: htb default {REST}"]
    lines.append(f"class replace dev {device} parent 1: classid 1:{REST} htb rate {FULL_SPEED}")
    for number, (network, conditions) in enumerate(lanes.items(), 1):
        lines += [
            f"class replace dev {device} parent 1: classid 1:{number} htb rate {FULL_SPEED}",
            change_line(device, number, conditions),
            f"filter add dev {device} parent 1: protocol ip prio 1 u32 "
            f"match ip dst {network} flowid 1:{number}",
        ]
    return lines


def change_line(device: str, number: int, conditions: LinkConditions, *, cut: bool = False) -> str:
    """For `tc -batch`: new conditions towards the site of this number, counted from 1."""
    words = " ".join(netem_words(conditions, cut=cut))
    return f"qdisc replace dev {device} parent 1:{number} handle {10 + number}: netem {words}"


def run_tc(*arguments: str, batch: list[str] | None = None) -> None:
    """Run `tc`; with `batch`, these commands at once. Raises DriverError with what `tc` says."""
    command = ["tc", *arguments, *(("-batch", "-") if batch else ())]
    try:
        done = subprocess.run(
            command,
            input="\n".join(batch or ()),
            capture_output=True,
            text=True,
            timeout=TC_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DriverError(f"{' '.join(command)} did not work: {error}") from error
    if done.returncode:
        raise DriverError(f"{' '.join(command)} failed: {done.stderr.strip() or done.returncode}")


def why_no_netem(namespace: str) -> str | None:
    """Why the kernel cannot do it, tried on the loopback of a namespace of ours; None if it can."""
    if shutil.which("tc") is None:
        return "the command tc is missing: install iproute2"
    try:
        run_tc("-n", namespace, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
        run_tc("-n", namespace, "qdisc", "del", "dev", "lo", "root")
    except DriverError as error:
        return f"the kernel has no sch_netem ({error})"
    return None
