"""The containers of one compose project: started by a compose tool, looked at and hurt through the engine.

`docker compose` and docker-compose 1.29 both do to start a project; whichever is installed is used. All
that belongs to a project carries its name in a label, so leftovers are found without its file. Calls
block: the driver makes them on threads.
"""

import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path, PurePosixPath
from typing import Any, Final

import docker
from docker import DockerClient
from docker.errors import APIError, DockerException, NotFound
from docker.models.containers import Container

from topology.errors import DriverError

PROJECT_LABEL: Final = "com.docker.compose.project"
SERVICE_LABEL: Final = "com.docker.compose.service"
DEFAULT_IMAGE: Final = "isthmus"
UP_TIMEOUT_S: Final = 240.0
ENGINE_TIMEOUT_S: Final = 30
SAID_MAX: Final = 2_000
"""Characters of what a tool said that go into an error."""


@dataclass(frozen=True, slots=True)
class View:
    """A container at one moment."""

    service: str
    identifier: str
    state: str
    """created, running, paused, exited, ... as the engine calls it."""
    is_healthy: bool
    """Its health check says so."""
    addresses: dict[str, str]
    """By network, without the project's name."""

    @property
    def is_alive(self) -> bool:
        """Its processes are there; a paused one's are."""
        return self.state in {"running", "paused"}


def image() -> str:
    """The image of all containers."""
    return os.environ.get("ISTHMUS_IMAGE") or DEFAULT_IMAGE


def find_compose() -> list[str]:
    """The compose tool of this machine. Raises DriverError if there is none that works."""
    for words in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(words[0]) is not None:
            done = subprocess.run([*words, "version"], capture_output=True, check=False)
            if done.returncode == 0:
                return words
    raise DriverError("no compose tool works here: install docker compose, or docker-compose 1.29")


def open_engine() -> DockerClient:
    """The Docker engine of this machine. Raises DriverError if it does not answer."""
    try:
        engine = docker.from_env(timeout=ENGINE_TIMEOUT_S)
        engine.ping()
    except (DockerException, OSError) as error:
        raise DriverError(
            f"no Docker engine answers ({error}): install docker.io and start dockerd"
        ) from error
    return engine


class Project:
    """One compose project."""

    def __init__(self, engine: DockerClient, name: str, file: Path) -> None:
        self.name = name
        self._engine = engine
        self._file = file
        self._tool = find_compose()
        try:
            engine.images.get(image())
        except NotFound:
            raise DriverError(f"there is no image {image()}: run make compose-image") from None

    # Life

    def create(self, services: Iterable[str]) -> None:
        """Make the containers of services, without starting them or what they depend on."""
        self._compose("up", "--no-start", "--no-deps", "--no-build", *services)

    def join(self, service: str, networks: Iterable[str]) -> None:
        """Put a container on networks it is not on yet: docker-compose 1.29 leaves that to its own start."""

        def connect(container: Container) -> None:
            container.reload()
            there = container.attrs["NetworkSettings"]["Networks"]
            for network in networks:
                if f"{self.name}_{network}" not in there:
                    self._network(network).connect(container, aliases=[service])

        self._call(service, connect)

    def up(self, services: Iterable[str]) -> None:
        """Start services in their order; returns when what others depend on is healthy."""
        self._compose("up", "--detach", "--no-build", *services)

    def start(self, service: str) -> None:
        """Start a container that has ended."""
        self._call(service, lambda container: container.start())

    def remove(self) -> None:
        """Remove everything of this project."""
        remove_project(self._engine, self.name)

    # Faults

    def signal(self, service: str, name: str = "SIGKILL") -> None:
        """Send a signal to the first process; nothing happens if it has ended."""

        def send(container: Container) -> None:
            try:
                container.kill(signal=name)
            except APIError as error:
                # It does not run any more.
                if error.status_code != HTTPStatus.CONFLICT:
                    raise

        self._call(service, send)

    def wait_ended(self, service: str, timeout_s: float) -> None:
        """Wait until the container does not run."""
        self._call(service, lambda container: container.wait(timeout=timeout_s))

    def pause(self, service: str) -> None:
        """Freeze all processes of a container."""
        self._call(service, lambda container: container.pause())

    def unpause(self, service: str) -> None:
        """Let them go on."""
        self._call(service, lambda container: container.unpause())

    def disconnect(self, service: str, network: str) -> None:
        """Take a container off a network: its interface goes."""
        self._call(service, lambda container: self._network(network).disconnect(container))

    def connect(self, service: str, network: str) -> None:
        """Put a container on a network again, under its old name and perhaps a new address."""
        self._call(service, lambda container: self._network(network).connect(container, aliases=[service]))

    # Looking

    def views(self) -> dict[str, View]:
        """Every container of the project, by service."""
        found = {}
        for container in self._containers():
            networks = container.attrs["NetworkSettings"]["Networks"] or {}
            view = View(
                service=container.attrs["Labels"].get(SERVICE_LABEL, ""),
                identifier=str(container.id),
                state=container.attrs["State"],
                # The engine tells it in words, "Up 5 seconds (healthy)", unless each container is asked.
                is_healthy="(healthy)" in container.attrs["Status"],
                addresses={
                    name.removeprefix(f"{self.name}_"): entry["IPAddress"]
                    for name, entry in networks.items()
                    if entry["IPAddress"]
                },
            )
            found[view.service] = view
        return found

    def namespace(self, service: str) -> Path:
        """The network namespace of a container that runs."""
        found: list[int] = []

        def look(container: Container) -> None:
            container.reload()
            found.append(container.attrs["State"]["Pid"])

        self._call(service, look)
        if not found[0]:
            raise DriverError(f"{service} does not run: start it first")
        return Path(f"/proc/{found[0]}/ns/net")

    def read(self, service: str, path: str) -> bytes:
        """A file of a container, also of one that has ended."""
        with tarfile.open(fileobj=self._archive(service, path)) as archive:
            member = archive.extractfile(PurePosixPath(path).name)
            assert member is not None
            return member.read()

    def copy_folder(self, service: str, path: str, target: Path) -> None:
        """The content of a folder of a container."""
        with tarfile.open(fileobj=self._archive(service, path)) as archive:
            top = PurePosixPath(path).name
            for member in archive.getmembers():
                member.name = str(PurePosixPath(member.name).relative_to(top))
                archive.extract(member, target, filter="data")

    def write_logs(self, folder: Path) -> None:
        """The logs of all containers that have run, a file each."""
        for container in self._containers():
            service = container.attrs["Labels"].get(SERVICE_LABEL)
            if service and container.attrs["State"] != "created":
                (folder / f"{service}.log").write_bytes(container.logs())

    # Details

    def _containers(self) -> list[Container]:
        # Sparse: one question for all of them, instead of one more for each.
        return self._engine.containers.list(
            all=True, filters={"label": f"{PROJECT_LABEL}={self.name}"}, sparse=True
        )

    def _call(self, service: str, action: Any) -> None:
        for container in self._containers():
            if container.attrs["Labels"].get(SERVICE_LABEL) == service:
                try:
                    action(container)
                except (DockerException, OSError) as error:
                    # An OSError where the engine does not answer in time.
                    raise DriverError(f"{service}: {error}") from error
                return
        raise DriverError(f"there is no container of {service} in {self.name}")

    def _network(self, name: str) -> Any:
        return self._engine.networks.get(f"{self.name}_{name}")

    def _archive(self, service: str, path: str) -> io.BytesIO:
        content = io.BytesIO()

        def fetch(container: Container) -> None:
            chunks, _ = container.get_archive(path)
            for chunk in chunks:
                content.write(chunk)

        self._call(service, fetch)
        content.seek(0)
        return content

    def _compose(self, *words: str) -> None:
        command = [*self._tool, "--project-name", self.name, "--file", str(self._file), *words]
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=UP_TIMEOUT_S,
                check=False,
                # Ctrl-C is for us: a tool that is cut short leaves what it was about to name.
                start_new_session=True,
            )
        except subprocess.TimeoutExpired as error:
            raise DriverError(f"{' '.join(command)} took longer than {UP_TIMEOUT_S:g} s") from error
        if done.returncode:
            raise DriverError(f"{' '.join(command)} failed: {done.stdout.strip()[-SAID_MAX:]}")


def remove_project(engine: DockerClient, name: str) -> None:
    """Remove containers, networks and volumes of a project, and nothing else."""
    label: dict[str, str | list[str] | bool] = {"label": f"{PROJECT_LABEL}={name}"}
    for container in engine.containers.list(all=True, filters=label, sparse=True):
        container.remove(force=True, v=True)
    for network in engine.networks.list(filters=label):
        network.remove()
    for volume in engine.volumes.list(filters=label):
        volume.remove()
