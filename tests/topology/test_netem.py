"""What `tc netem` would be told, and that a kernel without it is noticed."""

import pytest

from tests.topology.namespaces_needed import needs_namespaces
from topology.conditions import LinkConditions
from topology.errors import DriverError
from topology.namespaces import Namespaces
from topology.netem import change_line, netem_words, run_tc, set_up_lines, why_no_netem


@pytest.mark.parametrize(
    ("conditions", "words"),
    [
        (LinkConditions(), "limit 100000"),
        (LinkConditions(delay_ms=30), "limit 100000 delay 30ms"),
        (LinkConditions(delay_ms=80, jitter_ms=10), "limit 100000 delay 80ms 10ms"),
        (LinkConditions(delay_ms=250, loss=0.01), "limit 100000 delay 250ms loss 1%"),
        # Four in a row on average: 25 % of the bad end with each packet, and 2 % are bad in all.
        (LinkConditions(loss=0.02, burst=4), "limit 100000 loss gemodel 0.510204% 25%"),
        # 200 ms of queue and 50 ms on the way at 12 Mbit/s are 250 packets of 1,500 bytes.
        (LinkConditions(delay_ms=50, rate_mbit=12), "limit 250 delay 50ms rate 12mbit"),
    ],
)
def test_conditions_in_the_words_of_netem(conditions: LinkConditions, words: str) -> None:
    assert " ".join(netem_words(conditions)) == words


def test_a_cut_link_loses_everything_and_keeps_its_delay() -> None:
    line = change_line("wan0", 3, LinkConditions(delay_ms=20, loss=0.5), cut=True)
    assert line == "qdisc replace dev wan0 parent 1:3 handle 13: netem limit 100000 delay 20ms loss 100%"


def test_each_site_has_conditions_of_its_own() -> None:
    lanes = {"198.18.1.0/24": LinkConditions(delay_ms=10), "198.18.2.0/24": LinkConditions(delay_ms=90)}
    lines = set_up_lines("wan0", lanes)
    for number, (network, conditions) in enumerate(lanes.items(), 1):
        assert change_line("wan0", number, conditions) in lines
        assert any(f"match ip dst {network} flowid 1:{number}" in line for line in lines)
    assert lines[0].endswith("default 999")


@needs_namespaces
def test_a_kernel_without_netem_is_noticed() -> None:
    namespaces = Namespaces()
    namespaces.claim()
    try:
        namespaces.add("here")
        name = namespaces.name("here")
        reason = why_no_netem(name)
        if reason is None:
            # It has it: then it takes everything we say.
            lines = set_up_lines("lo", {"198.18.1.0/24": LinkConditions(50, 5, 0.02, 4, 12)})
            run_tc("-n", name, batch=lines)
        else:
            assert "sch_netem" in reason
            with pytest.raises(DriverError, match="netem delay 1ms failed"):
                run_tc(*f"-n {name} qdisc add dev lo root netem delay 1ms".split())
    finally:
        namespaces.remove_all()
