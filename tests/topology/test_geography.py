"""Delays from distances."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topology.geography import Location, distance_km, fibre_delay_ms, least_delay_ms, route_km

LOCATIONS = st.builds(Location, st.floats(-90, 90), st.floats(-180, 180))


def test_known_distances() -> None:
    pole, equator = Location(90, 0), Location(0, 50)
    assert distance_km(pole, equator) == pytest.approx(10_007.5, abs=1)
    assert distance_km(Location(0, 179), Location(0, -179)) == pytest.approx(222.4, abs=0.1)
    # London to New York is about 5,570 km.
    assert distance_km(Location(51.51, -0.13), Location(40.71, -74.01)) == pytest.approx(5_570, abs=10)


@pytest.mark.parametrize(
    ("distance", "route"), [(0, 0), (999, 1_498.5), (1_000, 1_500), (1_200, 1_500), (8_000, 10_000)]
)
def test_routes_are_longer_than_distances(distance: float, route: float) -> None:
    assert route_km(distance) == route


@given(LOCATIONS, LOCATIONS)
def test_delays_are_symmetric_and_never_below_the_shortest_way(first: Location, second: Location) -> None:
    assert fibre_delay_ms(first, second) == pytest.approx(fibre_delay_ms(second, first))
    assert 0 <= least_delay_ms(first, second) <= fibre_delay_ms(first, second) < 126
