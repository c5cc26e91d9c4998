"""A topology as a file for `docker compose` (and docker-compose 1.29): a container per broker and server.

A network per LAN, closed to everything else, and the WAN. Edge brokers are on both; ZooKeeper and the
routing brokers are on the WAN only; publishers and subscribers only in their LAN, so that nothing but
their edge brokers can be reached from there. Brokers write traces to a volume, and a Spark service
turns them into a report now and then.

The file has no `version`: both tools then take it as the Compose specification, and only that knows
`depends_on` with conditions in both. Containers have the network of the machine, without the delays
and losses of the topology's links; those are for the drivers to add.
"""

from pathlib import Path
from typing import Any, Final

import yaml

from coordinator.member import CLIENT_PORT
from topology.errors import TopologyError
from topology.model import Lan, Topology

LISTEN_PORT: Final = 7400
HTTP_PORT: Final = 7480
IMAGE: Final = "${ISTHMUS_IMAGE:-isthmus}"
BASE_IMAGE: Final = "python:3.12-slim"
REPORT_EVERY_S: Final = 60
TRACES: Final = "/traces"
REPORT: Final = "/report"
DATA: Final = "/data"
CLIENT_RESULTS: Final = "/tmp/results.json"
TOPOLOGY_FILE: Final = "/etc/isthmus/topology.yaml"
WAN: Final = "wan"

_REPORT_LOOP: Final = (
    "trap exit TERM; while sleep $$REPORT_EVERY_S & wait $$!; "
    f"do isthmus report {TRACES} --out {REPORT}; done"
)


def compose_text(
    topology: Topology,
    source: str,
    *,
    zookeeper_servers: int = 3,
    trace_sample: float = 1.0,
    session_timeout_s: float | None = None,
) -> str:
    """The file. `source` is how the topology is named: a file relative to it, or one of the library.

    A file for several containers has an ensemble of three ZooKeeper servers whatever the topology says,
    unless asked for otherwise: containers are there to be killed one by one.
    """
    keepers = [f"zookeeper-{number}" for number in range(1, zookeeper_servers + 1)]
    environment = {
        "ISTHMUS_ZOOKEEPER": ",".join(f"{keeper}:{CLIENT_PORT}" for keeper in keepers),
        "ISTHMUS_TRACE_DIR": TRACES,
        "ISTHMUS_TRACE_SAMPLE": str(trace_sample),
    }
    if session_timeout_s is not None:
        environment["ISTHMUS_SESSION_TIMEOUT_S"] = str(session_timeout_s)
    services: dict[str, Any] = {}
    for name, service in (
        *_keeper_services(topology, keepers),
        *_router_services(topology, keepers, environment),
        *_edge_services(topology, keepers, environment),
        *_client_services(topology, source, trace_sample),
        ("report", _report_service(topology)),
    ):
        if name in services:
            raise TopologyError(
                f"topology {topology.name} makes two services named {name!r}: rename the broker of that name"
            )
        services[name] = service
    document = {
        "x-isthmus": _common(),
        "services": services,
        "networks": {WAN: {}, **{_network(lan): {"internal": True} for lan in topology.lans}},
        "volumes": {name: {} for name in ("traces", "report", *(f"{keeper}-data" for keeper in keepers))},
    }
    text = yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=110, default_flow_style=False)
    # YAML's merge has no form in Python: it is written as a marked text and unmarked here.
    text = text.replace("x-isthmus:\n", "x-isthmus: &isthmus\n").replace(
        f"{_MERGE!r}: {_COMMON!r}", "<<: *isthmus"
    )
    return f"# Made by `isthmus topology compose {source}`: change the topology, not this file.\n{text}"


_MERGE: Final = "<<"
_COMMON: Final = "*isthmus"


class _Line(list[str]):
    """A list that is written in one line, as far as that goes."""


class _Dumper(yaml.SafeDumper):
    """Writes as people do: lists indented under their key, command lines in one."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_line(dumper: yaml.SafeDumper, line: _Line) -> yaml.Node:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", line, flow_style=True)


_Dumper.add_representer(_Line, _represent_line)


def _common() -> dict[str, Any]:
    return {
        "image": IMAGE,
        "build": {
            "context": ".",
            "args": {
                "BASE_IMAGE": f"${{BASE_IMAGE:-{BASE_IMAGE}}}",
                # Without a value they are taken from the environment, or left out.
                "PIP_INDEX_URL": None,
                "PIP_TRUSTED_HOST": None,
            },
        },
    }


def _keeper_services(topology: Topology, keepers: list[str]) -> list[tuple[str, dict[str, Any]]]:
    return [
        (
            keeper,
            {
                _MERGE: _COMMON,
                "command": _Line(
                    [
                        *("isthmus", "zookeeper", "--ensemble", ",".join(keepers), "--member", str(number)),
                        *("--directory", DATA, "--insecure"),
                    ]
                ),
                "networks": _Line([WAN]),
                "volumes": [f"{keeper}-data:{DATA}"],
                "healthcheck": _health(zookeeper_check(keeper, CLIENT_PORT)),
                "labels": _labels(topology, "zookeeper"),
            },
        )
        for number, keeper in enumerate(keepers, 1)
    ]


def _router_services(
    topology: Topology, keepers: list[str], environment: dict[str, str]
) -> list[tuple[str, dict[str, Any]]]:
    return [
        (
            router.name,
            _broker(
                ["isthmus", "router", "--id", router.name, "--host-label", router.host],
                keepers,
                environment,
                networks=[WAN],
                labels=_labels(topology, "router"),
            ),
        )
        for router in topology.routers
    ]


def _edge_services(
    topology: Topology, keepers: list[str], environment: dict[str, str]
) -> list[tuple[str, dict[str, Any]]]:
    return [
        (
            edge,
            _broker(
                # Clients are told where their edge brokers are; multicast might leave by the WAN.
                ["isthmus", "edge", "--id", edge, "--lan", lan.name, "--no-discovery"],
                keepers,
                environment,
                networks=[_network(lan), WAN],
                labels=_labels(topology, "edge", lan),
            ),
        )
        for lan in topology.lans
        for edge in lan.edges
    ]


def _broker(
    command: list[str],
    keepers: list[str],
    environment: dict[str, str],
    *,
    networks: list[str],
    labels: dict[str, str],
) -> dict[str, Any]:
    name = command[command.index("--id") + 1]
    return {
        _MERGE: _COMMON,
        "command": _Line(
            [
                *command,
                *("--listen", f"0.0.0.0:{LISTEN_PORT}", "--advertise", f"{name}:{LISTEN_PORT}"),
                *("--http", f"0.0.0.0:{HTTP_PORT}", "--insecure"),
            ]
        ),
        "environment": environment,
        "networks": _Line(networks),
        "volumes": [f"traces:{TRACES}"],
        "depends_on": {keeper: {"condition": "service_healthy"} for keeper in keepers},
        "healthcheck": _health(broker_check("127.0.0.1", HTTP_PORT)),
        # A broker drains at the first SIGTERM, for ten seconds at most.
        "stop_grace_period": "15s",
        "labels": labels,
    }


def _client_services(
    topology: Topology, source: str, trace_sample: float
) -> list[tuple[str, dict[str, Any]]]:
    """All publishers and subscribers of a LAN are one container, as they are one process in other drivers."""
    with_clients = {item.lan for item in topology.publishers} | {item.lan for item in topology.subscribers}
    is_file = Path(source).suffix in {".yaml", ".yml"}
    services = []
    for lan in topology.lans:
        if lan.name not in with_clients:
            continue
        service: dict[str, Any] = {
            _MERGE: _COMMON,
            "command": _Line(
                [
                    *("python3", "-m", "topology.load"),
                    *("--trace-dir", TRACES, "--trace-sample", str(trace_sample)),
                    *(TOPOLOGY_FILE if is_file else source, lan.name),
                    CLIENT_RESULTS,
                    *(f"{edge}={edge}:{LISTEN_PORT}" for edge in lan.edges),
                ]
            ),
            "networks": _Line([_network(lan)]),
            "volumes": [f"traces:{TRACES}"],
            "depends_on": {edge: {"condition": "service_healthy"} for edge in lan.edges},
            # They end when their standard input does, and wait for each other for a limited time only.
            "stdin_open": True,
            "restart": "on-failure",
            "labels": _labels(topology, "clients", lan),
        }
        if is_file:
            mounted = source if Path(source).is_absolute() else f"./{source}"
            service["volumes"] += [f"{mounted}:{TOPOLOGY_FILE}:ro"]
        services.append((lan.client_host, service))
    return services


def _report_service(topology: Topology) -> dict[str, Any]:
    return {
        _MERGE: _COMMON,
        "command": _Line(["bash", "-c", _REPORT_LOOP]),
        "environment": {
            "REPORT_EVERY_S": f"${{REPORT_EVERY_S:-{REPORT_EVERY_S}}}",
            "SPARK_LOCAL_IP": "127.0.0.1",
        },
        # Spark talks to itself only, and asks for the address of its host's name.
        "network_mode": "none",
        "hostname": "localhost",
        "volumes": [f"traces:{TRACES}", f"report:{REPORT}"],
        "labels": _labels(topology, "report"),
    }


def zookeeper_check(host: str, port: int) -> str:
    """A line of bash that succeeds if a ZooKeeper server serves.

    bash, grep and head are in every base image; to start Python for each check would cost more than
    what is checked.
    """
    return f"exec 3<>/dev/tcp/{host}/{port} && echo srvr >&3 && grep -q ^Mode: <&3"


def broker_check(host: str, port: int) -> str:
    """A line of bash that succeeds if a broker is ready."""
    return (
        f"exec 3<>/dev/tcp/{host}/{port} && printf 'GET /readyz HTTP/1.0\\r\\n\\r\\n' >&3 "
        "&& head -n 1 <&3 | grep -q ' 200 '"
    )


def _health(check: str) -> dict[str, Any]:
    return {
        "test": _Line(["CMD", "bash", "-c", check]),
        # Each check starts a process in the container, which costs more than the check.
        "interval": "5s",
        "timeout": "5s",
        "retries": 20,
    }


def _labels(topology: Topology, role: str, lan: Lan | None = None) -> dict[str, str]:
    """How the testbed finds its containers."""
    labels = {"isthmus.topology": topology.name, "isthmus.role": role}
    return labels if lan is None else {**labels, "isthmus.lan": lan.name}


def _network(lan: Lan) -> str:
    return f"lan-{lan.name}"
