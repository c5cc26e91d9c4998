"""Compose files: the committed one is the generator's, and it says who can reach whom."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from topology.compose import compose_text
from topology.compose_driver import ComposeDriver
from topology.driver import DriverSettings
from topology.errors import DriverError, TopologyError
from topology.model import Topology, library, load_topology, parse_topology
from topology.wan_kind import WanKind

ROOT = Path(__file__).parents[2]
TWO_LANS = compose_text(load_topology("two-lans"), "two-lans")


def services(text: str) -> dict[str, Any]:
    found = yaml.safe_load(text)["services"]
    assert isinstance(found, dict)
    return found


def test_the_committed_file_is_what_the_generator_makes() -> None:
    assert (ROOT / "docker-compose.yml").read_text() == TWO_LANS, "run make compose-file"


def test_who_is_on_which_network() -> None:
    networks = {name: service.get("networks") for name, service in services(TWO_LANS).items()}
    assert networks == {
        **{f"zookeeper-{number}": ["wan"] for number in (1, 2, 3)},
        **{f"router-{number}": ["wan"] for number in (1, 2, 3)},
        **{f"plant-{number}": ["lan-plant", "wan"] for number in (1, 2)},
        "office-1": ["lan-office", "wan"],
        "plant-clients": ["lan-plant"],
        "office-clients": ["lan-office"],
        "report": None,
    }
    document = yaml.safe_load(TWO_LANS)
    assert document["networks"] == {
        "wan": {},
        "lan-plant": {"internal": True},
        "lan-office": {"internal": True},
    }


@pytest.mark.parametrize("name", sorted(library()))
def test_every_topology_makes_a_consistent_file(name: str) -> None:
    topology = load_topology(name)
    document = yaml.safe_load(compose_text(topology, name))
    # Both tools take a file without a version as the Compose specification.
    assert set(document) == {"x-isthmus", "services", "networks", "volumes"}
    found = document["services"]
    brokers = [
        *(edge for lan in topology.lans for edge in lan.edges),
        *(router.name for router in topology.routers),
    ]
    assert set(brokers) <= set(found)
    for service in found.values():
        assert service["image"] == "${ISTHMUS_IMAGE:-isthmus}" and service["build"]["context"] == "."
        assert all(isinstance(word, str) for word in service["command"])
        assert set(service.get("networks", [])) <= set(document["networks"])
        for volume in service.get("volumes", []):
            assert volume.split(":")[0] in document["volumes"]
        for other, condition in service.get("depends_on", {}).items():
            assert condition == {"condition": "service_healthy"} and "healthcheck" in found[other]
    for broker in brokers:
        assert found[broker]["healthcheck"]["test"][:3] == ["CMD", "bash", "-c"]
        assert "traces:/traces" in found[broker]["volumes"]
        assert found[broker]["environment"]["ISTHMUS_TRACE_SAMPLE"] == "1.0"


def test_the_report_reads_the_traces() -> None:
    report = services(TWO_LANS)["report"]
    assert report["volumes"] == ["traces:/traces", "report:/report"]
    # A dollar is doubled, or compose would take it for a variable of its own.
    line = report["command"][2].replace("$$", "$")
    assert "isthmus report /traces --out /report" in line
    assert subprocess.run(["bash", "-n", "-c", line], check=False).returncode == 0


def test_a_single_zookeeper_on_demand() -> None:
    found = services(compose_text(load_topology("two-lans"), "two-lans", zookeeper_servers=1))
    assert [name for name in found if name.startswith("zookeeper")] == ["zookeeper-1"]
    assert found["router-1"]["environment"]["ISTHMUS_ZOOKEEPER"] == "zookeeper-1:2181"


def test_a_topology_of_the_users_own_is_mounted() -> None:
    text = "lans: {a: {}, b: {}}\nrouters: 1\ntopics: {t: {}}\npublishers: [{lan: a, topic: t}]"
    found = services(compose_text(parse_topology(text, "sites/mine.yaml"), "sites/mine.yaml"))
    assert found["a-clients"]["volumes"] == [
        "traces:/traces",
        "./sites/mine.yaml:/etc/isthmus/topology.yaml:ro",
    ]
    assert "/etc/isthmus/topology.yaml" in found["a-clients"]["command"]
    # Nobody publishes or subscribes there.
    assert "b-clients" not in found


def test_refuses_a_broker_whose_name_is_taken() -> None:
    topology = parse_topology("lans: {a: {}}\nrouters: [report]")
    with pytest.raises(TopologyError, match="makes two services named 'report': rename the broker"):
        compose_text(topology, "x.yaml")


def compose_command(*words: str) -> list[str]:
    """A compose tool of this machine, or a reason to skip."""
    if shutil.which(words[0]) is None:
        pytest.skip(f"{words[0]} is not installed")
    if subprocess.run([*words, "version"], capture_output=True, check=False).returncode:
        pytest.skip(f"{' '.join(words)} does not work here")
    return list(words)


@pytest.mark.parametrize("tool", [("docker", "compose"), ("docker-compose",)])
@pytest.mark.parametrize("name", ["two-lans", "global"])
def test_the_tools_accept_the_file(tool: tuple[str, ...], name: str, tmp_path: Path) -> None:
    command = compose_command(*tool)
    topology: Topology = load_topology(name)
    file = tmp_path / "docker-compose.yml"
    file.write_text(compose_text(topology, name))
    done = subprocess.run(
        [*command, "-f", str(file), "config", "-q"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "obsolete" not in done.stderr


def test_netem_between_containers_is_refused_with_the_remedy() -> None:
    with pytest.raises(DriverError, match="joined by the ferry on every kernel: leave --wan out, or run"):
        ComposeDriver(load_topology("two-lans"), DriverSettings(wan=WanKind.NETEM))
