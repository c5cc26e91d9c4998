"""What an operator asks a broker over HTTP: /healthz, /readyz, /status, /metrics."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from overlay.errors import CloseReason
from overlay.locator import Locator
from runtime.config import is_loopback
from runtime.hub import Hub
from runtime.link import LinkStatistics
from runtime.tls import Tls

Status = Callable[[], Mapping[str, Any]]
Readiness = Callable[[], str]
"""Empty if ready, else what is missing."""
Metrics = Callable[[], Iterable[Metric]]


class _Collector(Collector):
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics()


class OperationsServer:
    """The HTTP side of one broker. It reads statistics when asked and keeps no counters itself."""

    def __init__(self, status: Status, readiness: Readiness, metrics: Metrics) -> None:
        self._status = status
        self._readiness = readiness
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Collector(metrics))
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int, tls: Tls | None = None) -> str:
        """Serve; returns where. With certificates, other hosts are served with HTTPS only."""
        application = web.Application()
        application.router.add_get("/healthz", self._healthz)
        application.router.add_get("/readyz", self._readyz)
        application.router.add_get("/status", self._get_status)
        application.router.add_get("/metrics", self._get_metrics)
        self._runner = web.AppRunner(application, access_log=None)
        await self._runner.setup()
        https = tls.https if tls is not None and not is_loopback(host) else None
        site = web.TCPSite(self._runner, host, port, ssl_context=https)
        await site.start()
        bound_host, bound_port = self._runner.addresses[0][:2]
        return f"{'https://' if https is not None else ''}{Locator(bound_host, bound_port)}"

    async def close(self) -> None:
        """Stop serving."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _healthz(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, request: web.Request) -> web.Response:
        missing = self._readiness()
        return web.Response(text=f"{missing or 'ready'}\n", status=503 if missing else 200)

    async def _get_status(self, request: web.Request) -> web.Response:
        return web.json_response(self._status(), dumps=to_json)

    async def _get_metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )


def to_json(value: Any) -> str:
    """JSON of plain values and statistics dataclasses."""
    return json.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, set | frozenset):
        return sorted(value)
    return str(value)


def counter(name: str, text: str, value: float) -> Metric:
    """A counter without labels."""
    family = CounterMetricFamily(name, text)
    family.add_metric([], value)
    return family


def counters(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    """A counter with one label."""
    family = CounterMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def gauge(name: str, text: str, value: float) -> Metric:
    """A gauge without labels."""
    family = GaugeMetricFamily(name, text)
    family.add_metric([], value)
    return family


def gauges(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    """A gauge with one label."""
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def hub_metrics(hub: Hub, links: Iterable[LinkStatistics]) -> Iterable[Metric]:
    """Metrics every broker has: its connections and its links to other brokers."""
    yield gauge("isthmus_connections", "Open connections.", hub.connection_count)
    yield counters(
        "isthmus_connections_closed",
        "Connections that ended, by reason.",
        "reason",
        {str(reason): hub.closes[reason] for reason in CloseReason if hub.closes[reason]},
    )
    yield counter(
        "isthmus_datagrams_rejected",
        "Datagrams that are nobody's, forged or replayed.",
        hub.datagrams_rejected,
    )
    known = list(links)
    yield gauges(
        "isthmus_link_up", "1 if the link to this broker is up.", "peer", {s.peer: s.up for s in known}
    )
    yield gauges(
        "isthmus_link_round_trip_seconds",
        "Latest round trip to this broker.",
        "peer",
        {s.peer: s.round_trip_ms / 1e3 for s in known},
    )
    yield gauges(
        "isthmus_link_waiting_bytes",
        "Bytes waiting for this broker.",
        "peer",
        {s.peer: s.outbox.waiting_bytes for s in known},
    )
    yield counters(
        "isthmus_link_sent_bytes",
        "Bytes sent to this broker.",
        "peer",
        {s.peer: s.outbox.bytes_sent for s in known},
    )
    yield counters(
        "isthmus_link_sent_messages",
        "Messages sent to this broker.",
        "peer",
        {s.peer: s.outbox.messages_sent for s in known},
    )
