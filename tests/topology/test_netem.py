"""What `tc netem` is told, and that a kernel without it is noticed. Packets meet it in `make netem-test`."""

from pathlib import Path

import pytest

from tests.topology.namespaces_needed import needs_namespaces
from topology.conditions import LinkConditions
from topology.emulated_wan import choose
from topology.emulation import EmulatedNetwork, two_sites
from topology.errors import DriverError
from topology.namespaces import names_of
from topology.netem import (
    change_lines,
    forget_line,
    host_line,
    netem_words,
    rate_words,
    set_up_lines,
    why_no_netem,
)
from topology.wan_kind import WanKind


@pytest.mark.parametrize(
    ("conditions", "words"),
    [
        (LinkConditions(), "limit 100000"),
        (LinkConditions(delay_ms=30), "limit 100000 delay 30ms"),
        (LinkConditions(delay_ms=80, jitter_ms=10), "limit 100000 delay 80ms 10ms"),
        (LinkConditions(delay_ms=250, loss=0.01), "limit 100000 delay 250ms loss 1%"),
        # Four in a row on average: 25 % of the bad end with each packet, and 2 % are bad in all.
        (LinkConditions(loss=0.02, burst=4), "limit 100000 loss gemodel 0.510204% 25%"),
    ],
)
def test_conditions_in_the_words_of_netem(conditions: LinkConditions, words: str) -> None:
    assert " ".join(netem_words(conditions)) == words


@pytest.mark.parametrize(
    ("rate_mbit", "words"),
    [
        # 200 ms of queue and 2 ms at once are 300,000 and 3,000 bytes at 12 Mbit/s.
        (12, "rate 12mbit burst 3000 limit 300000"),
        # One packet at least.
        (0.05, "rate 0.05mbit burst 1600 limit 1600"),
    ],
)
def test_a_rate_in_the_words_of_tbf(rate_mbit: float, words: str) -> None:
    assert " ".join(rate_words(rate_mbit)) == words


def test_a_cut_link_loses_everything_and_keeps_its_delay_and_rate() -> None:
    conditions = LinkConditions(delay_ms=20, loss=0.5, rate_mbit=12)
    assert change_lines("wan0", 3, conditions, cut=True) == [
        "qdisc replace dev wan0 parent 1:3 handle 13: netem limit 100000 delay 20ms loss 100%",
        "qdisc replace dev wan0 parent 13:1 handle 2003: tbf rate 12mbit burst 3000 limit 300000",
    ]


def test_each_site_has_conditions_and_each_host_belongs_to_a_site() -> None:
    lanes = {2: LinkConditions(delay_ms=10), 3: LinkConditions(delay_ms=90)}
    lines = set_up_lines("u1", lanes)
    # The rates are those of IP packets.
    assert lines[0].endswith("stab overhead -14 htb default 999")
    for number, conditions in lanes.items():
        assert set(change_lines("u1", number, conditions)) <= set(lines)
    line = "filter add dev u1 parent 1: protocol ip pref 7 u32 match ip dst 198.18.3.10/32 flowid 1:3"
    assert host_line("u1", 7, "198.18.3.10", 3) == line
    assert forget_line("u1", 7) == "filter del dev u1 parent 1: pref 7"


@needs_namespaces
def test_auto_is_netem_where_the_kernel_has_it() -> None:
    reason = why_no_netem()
    assert choose(WanKind.FERRY) is WanKind.FERRY
    if reason is None:
        assert choose(WanKind.AUTO) is choose(WanKind.NETEM) is WanKind.NETEM
    else:
        assert "sch_netem" in reason
        assert choose(WanKind.AUTO) is WanKind.FERRY
        with pytest.raises(DriverError, match="use --wan ferry"):
            choose(WanKind.NETEM)


@needs_namespaces
@pytest.mark.testbed
async def test_a_kernel_without_netem_is_told_before_anything_is_made(tmp_path: Path) -> None:
    if why_no_netem() is None:
        pytest.skip("this kernel has it: test_emulation has it carry packets")
    network = EmulatedNetwork(two_sites(LinkConditions(), LinkConditions()), tmp_path, wan=WanKind.NETEM)
    try:
        with pytest.raises(DriverError, match="sch_netem"):
            await network.start()
    finally:
        run = network.namespaces.run
        await network.stop()
    assert names_of(run) == [] and network.process is None
