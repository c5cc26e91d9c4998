"""Fixtures shared by all tests: one real ZooKeeper for the session, a fresh chroot for each test."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.embedded import EmbeddedZooKeeper
from overlay.messages import Role
from runtime.certificates import make_authority, make_certificate
from runtime.compiled import stale_modules

_chroot_numbers = itertools.count(1)


def pytest_configure() -> None:
    """Refuse to test something else than the sources."""
    if stale := stale_modules():
        pytest.exit(f"{', '.join(stale)}: compiled before the source was changed: make compile or interpret")


@pytest.fixture(scope="session")
def zookeeper() -> Iterator[EmbeddedZooKeeper]:
    """A running server, started by the first test that asks for it. Do not stop it: others use it too."""
    with EmbeddedZooKeeper() as server:
        yield server


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an authority and certificates of the brokers and clients of tests."""
    folder = tmp_path_factory.mktemp("certificates")
    make_authority(folder)
    for name in ("server", "a", "bystander", "ea", "ea2", "eb"):
        make_certificate(folder, Role.EDGE, name, ["127.0.0.1", "localhost"])
    for name in ("r1", "r2", "r3"):
        make_certificate(folder, Role.ROUTER, name, ["127.0.0.1"])
    for name in ("alice", "bob"):
        make_certificate(folder, Role.CLIENT, name)
    return folder


@pytest.fixture
def zookeeper_hosts(zookeeper: EmbeddedZooKeeper) -> str:
    """The connection string of the session's server, without a chroot."""
    return zookeeper.hosts


@pytest.fixture
def chroot() -> str:
    """A path that no other test uses; the test creates it if it needs it."""
    return f"/test-{next(_chroot_numbers)}"
