"""How long light needs from place to place: realistic delays for links between sites on a map.

Cables are longer than the shortest way. ITU-T Recommendation G.826 plans with a route of 1.5 times
the distance up to 1,000 km, of 1,500 km from there to 1,200 km, and of 1.25 times the distance beyond;
Y.1541 takes the same routes with 5 microseconds for a kilometre of fibre. That leaves out routers
and queues, a few milliseconds on a good path.
"""

import math
from typing import Final, NamedTuple

LATITUDE_MAX: Final = 90.0
LONGITUDE_MAX: Final = 180.0
EARTH_RADIUS_KM: Final = 6_371.0
FIBRE_MS_PER_KM: Final = 0.005


class Location(NamedTuple):
    """A point on the earth in degrees; north and east are positive."""

    latitude: float
    longitude: float


def distance_km(first: Location, second: Location) -> float:
    """The shortest way over the ground (haversine, on a sphere)."""
    first_latitude, second_latitude = math.radians(first.latitude), math.radians(second.latitude)
    half_latitude = (second_latitude - first_latitude) / 2
    half_longitude = math.radians(second.longitude - first.longitude) / 2
    chord = (
        math.sin(half_latitude) ** 2
        + math.cos(first_latitude) * math.cos(second_latitude) * math.sin(half_longitude) ** 2
    )
    return 2 * EARTH_RADIUS_KM * math.asin(min(1.0, math.sqrt(chord)))


def route_km(distance: float) -> float:
    """How long a cable is planned to be that covers a distance in km."""
    if distance < 1_000:
        return 1.5 * distance
    return 1_500.0 if distance <= 1_200 else 1.25 * distance


def fibre_delay_ms(first: Location, second: Location) -> float:
    """One way through fibre along the planned route."""
    return FIBRE_MS_PER_KM * route_km(distance_km(first, second))


def least_delay_ms(first: Location, second: Location) -> float:
    """One way through fibre along the shortest way: nothing real is faster."""
    return FIBRE_MS_PER_KM * distance_km(first, second)
