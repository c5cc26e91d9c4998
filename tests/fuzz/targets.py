"""Everything that reads what others have written, with examples and the errors it may raise."""

import dataclasses
import json
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgpack

from coordinator.errors import RecordError
from coordinator.records import (
    ClusterRecord,
    EdgeRecord,
    Endpoint,
    EpochRecord,
    FlagRecord,
    RouterRecord,
    TopicRecord,
    decode_candidate,
    encode_candidate,
)
from overlay.batch import Run, decode_messages, encode_batch, encode_message
from overlay.codec import decode, decode_heartbeat, encode, encode_heartbeat
from overlay.discovery import Announcement, Query, decode_datagram, encode_datagram
from overlay.errors import InvalidNameError, ProtocolError, QosError
from overlay.express import Express, Numbers, Report
from overlay.framing import FRAME_HEADER_BYTES, FrameReader
from overlay.locator import Locator
from overlay.messages import (
    Close,
    ControlMessage,
    Declare,
    Declared,
    Draining,
    EndpointKind,
    FrameKind,
    Heartbeat,
    Hello,
    Matched,
    Measured,
    Prune,
    Publishers,
    QosChanged,
    QosIntent,
    Refused,
    Resume,
    Role,
    Undeclare,
    Welcome,
)
from overlay.qos import SubscriptionQos, TopicQos
from overlay.trace import BlockKind as Kind
from overlay.trace import Event, Sampling, SegmentHeader, TraceError, TraceLog, encode_block
from routing_broker.core import RouterCore
from runtime.access import AccessRules, Action
from runtime.config import EdgeConfig, RouterConfig, load_config
from runtime.datagrams import Seal
from runtime.errors import ConfigurationError
from runtime.tokens import Tokens
from spark_analysis.segments import read_segment
from tests.edge_broker.lan import REMOTE, Lan
from tests.fuzz.mutation import cuts
from topology.errors import TopologyError
from topology.model import parse_topology

Read = Callable[[bytes, random.Random], None]


@dataclass(frozen=True)
class Target:
    """One reader of foreign bytes."""

    name: str
    corpus: Sequence[bytes]
    read: Read
    errors: tuple[type[Exception], ...]
    """All it may raise."""
    share: int = 4
    """How many inputs it gets, relative to the others."""


QOS = TopicQos(period_ms=10, deadline_ms=50, loss_tolerance=2, retention=8)
CONTROL: tuple[ControlMessage, ...] = (
    Hello(Role.EDGE, "edge-1", 5, 10_000_000, "plant", "c1", 7, 3),
    Hello(Role.CLIENT, "00000000000000aa", 5, 200_000_000, token="0123456789abcdef.secret"),
    Welcome(Role.ROUTER, "r1", 5, cluster="c1", received=9, edges=("10.0.0.1:7400", "[::1]:7400")),
    Close("goodbye", "that was all"),
    Declare(1, EndpointKind.PUBLISHER, "plant/temperature", QOS.to_record(), QosIntent.CHANGE),
    Declare(2, EndpointKind.SUBSCRIBER, "t", None, QosIntent.MATCH, {"deadline_ms": 5.0}, watches=True),
    Declared(1, 3, QOS.to_record()),
    Refused(1, "qos", "no"),
    Undeclare(1),
    Matched(1, 2),
    Prune((1, 2, 5, 2**63)),
    QosChanged(1, QOS.to_record()),
    Publishers(2, (1, 2, 3), True),
    Measured({"r1": [0.01, 1.5, 2, 1_000_000, 1.0]}),
    Declare(2, EndpointKind.SUBSCRIBER, "t", intent=QosIntent.NEW, resume=(100, 7, 101, 2**63)),
    Draining(("10.0.0.1:7400",)),
    Resume("t", 2, "plant", "edge-1", {"deadline_ms": 5.0}, (100, 7)),
)
HEARTBEAT = encode_heartbeat(Heartbeat(1, 2, 3, 4))


def data_frame(*sequences: int, topic: int = 1, publisher: int = 100, shift_ns: int = 0) -> bytes:
    """A data frame as clients and brokers send it."""
    messages = [encode_message(topic, publisher, each, 10**12, b"payload") for each in sequences]
    return encode_batch(3, 77, shift_ns, [Run(1, message) for message in messages])


DATA = (
    data_frame(1),
    data_frame(1, 2, 3, 4),
    data_frame(9, topic=2, publisher=2**63 - 1, shift_ns=-(2**63)),
    data_frame(2**63 - 1, shift_ns=2**62),
    encode_batch(0, 0, 0, []),
)
STREAMS = (
    *(encode(message) for message in CONTROL),
    *DATA,
    HEARTBEAT,
    encode(CONTROL[0]) + HEARTBEAT + b"".join(DATA) + encode(CONTROL[8]),
    encode(CONTROL[1]) + encode(CONTROL[4]) + DATA[1] + HEARTBEAT + encode(CONTROL[3]),
)


def frames_of(pieces: Sequence[bytes]) -> tuple[list[tuple[int, bytes]], str, int]:
    """What a reader makes of a stream: its frames, why it ended, and the most it kept meanwhile."""
    reader = FrameReader()
    frames: list[tuple[int, bytes]] = []
    kept = 0
    try:
        for piece in pieces:
            reader.feed(piece)
            while taken := reader.take_frames(at_most=1 if not frames else 2**31):
                frames += taken
                reader.open_up()
            kept = max(kept, reader.pending_bytes)
    except ProtocolError as error:
        return frames, str(error), kept
    return frames, "", kept


def read_stream(data: bytes, rng: random.Random) -> None:
    pieces = cuts(data, rng)
    whole, split = frames_of([data]), frames_of(pieces)
    assert whole[:2] == split[:2], "a stream means something else when it arrives in pieces"
    assert split[2] <= len(data)


def read_control(data: bytes, rng: random.Random) -> None:
    message = decode(data[0] if data else 1, data[1:])
    encoded = encode(message)  # compared as bytes: no NaN equals itself
    assert encode(decode(*frames_of([encoded])[0][0])) == encoded


def read_client_frame(data: bytes, rng: random.Random) -> None:
    lan = Lan()
    lan.subscribe()
    lan.interest(REMOTE)
    try:
        lan.core.admit_from_client(lan.publisher, data, rng.choice((0, 5, -(2**63))), lan.now_ns)
    finally:
        lan.core.validate()


def read_broker_frame(data: bytes, rng: random.Random) -> None:
    lan = Lan()
    lan.subscribe()
    lan.interest(REMOTE)
    lan.router_up("r1")
    try:
        for _ in range(2):
            lan.core.admit_from_broker(
                data, rng.choice((0, -(2**63), 2**62)), lan.now_ns, rng.choice(("r1", "r2", ""))
            )
        lan.core.release_held(2 * lan.now_ns)
    finally:
        lan.core.validate()


def read_edge_frame(data: bytes, rng: random.Random) -> None:
    core = RouterCore()
    source = core.peer("a1", "a")
    core.peer("b1", "b")
    core.set_topic(1, "t", QOS, {"b1": "b"}, 0, "r2", None)
    core.backup_up("r2", Lan().publisher.outbox, 0)
    try:
        core.admit(source, data, rng.choice((0, -(2**63), 2**62)), 10**12)
        core.keep("r2", 1, data, 0, 10**12)
        core.recover("r2", 2 * 10**12)
    finally:
        core.validate()


def read_messages(data: bytes, rng: random.Random) -> None:
    for message in decode_messages(data):
        assert len(message.payload) <= len(data)


def read_datagram(data: bytes, rng: random.Random) -> None:
    message = decode_datagram(data)
    assert decode_datagram(encode_datagram(message)) == message


def read_names(data: bytes, rng: random.Random) -> None:
    text = data.decode("utf-8", "replace")
    with suppress(InvalidNameError):
        assert Locator.parse(str(Locator.parse(text))) == Locator.parse(text)
    assert Endpoint.parse(text).name == text


def read_seal(data: bytes, rng: random.Random) -> None:
    seal = Seal.parse(data.decode("utf-8", "replace"))
    assert seal is None or Seal.parse(str(seal)) == seal


def read_qos(data: bytes, rng: random.Random) -> None:
    try:
        fields = msgpack.unpackb(data, strict_map_key=False)
    except (ValueError, TypeError, RecursionError):
        return
    if isinstance(fields, dict):
        with suppress(QosError):
            SubscriptionQos.from_record(fields)
        TopicQos.from_record(fields)


RECORDS: tuple[tuple[Callable[[bytes], object], bytes], ...] = (
    (ClusterRecord.from_json, ClusterRecord("c1").to_json()),
    (RouterRecord.from_json, RouterRecord("r1", "10.0.0.1:7500", "host-1", 1.5).to_json()),
    (EdgeRecord.from_json, EdgeRecord("e1", "10.0.0.1:7400", "plant", "host-1").to_json()),
    (TopicRecord.from_json, TopicRecord(7, "t", QOS, "r1", "r2", 3).to_json()),
    (EpochRecord.from_json, EpochRecord(3, "r1", "c-0000000001").to_json()),
    (FlagRecord.from_json, FlagRecord("t", "r1", "too slow").to_json()),
    (decode_candidate, encode_candidate("r1")),
)


def read_record(data: bytes, rng: random.Random) -> None:
    reader, _ = RECORDS[rng.randrange(len(RECORDS))]
    reader(data)


SEGMENT_HEADER = SegmentHeader(
    *("edge-1", "edge", "plant", "boot", "boot/17"), 42, 3, 1_700_000_000_000_000_000, 5_000_000_000, 0.01, 7
)


def segment() -> bytes:
    """A trace segment as a broker writes it."""
    log = TraceLog(Sampling(1))
    log.define_topic(3, "valve", QOS)
    edge = log.peer("edge-1")
    for sequence in range(1, 6):
        log.record(Event.RECEIVED, 3, 2**64 - 1, sequence, in_ns=100 + sequence, peer_in=edge)
    tables, records = log.take()
    return SEGMENT_HEADER.encode() + tables + encode_block(Kind.RECORDS, records)


def read_trace(data: bytes, rng: random.Random) -> None:
    read_segment(data)


def read_topology(data: bytes, rng: random.Random) -> None:
    parse_topology(data.decode("utf-8", "replace"))


@contextmanager
def file_of(data: bytes, suffix: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"file{suffix}"
        path.write_bytes(data)
        yield path


CONFIG = b"""
[edge]
id = "edge-1"
lan = "plant"
listen = "127.0.0.1:7400"
zookeeper = "zk1:2181,zk2:2181"
heartbeat_ms = 20.5
silence_ms = 100
discovery = false
clock_drift_ppm = 50

[router]
id = "router-1"
capacity = 2
mode = "frame+"
"""


def read_config(data: bytes, rng: random.Random) -> None:
    with file_of(data, rng.choice((".toml", ".yaml"))) as path:
        with suppress(ConfigurationError):
            load_config(RouterConfig, "router", path, environment={})
        load_config(EdgeConfig, "edge", path, environment={})


RULES = b'[[rule]]\nprincipals = ["a", "b-*"]\npublish = ["plant/**"]\nsubscribe = ["*"]\ndeclare = []\n'


def read_rules(data: bytes, rng: random.Random) -> None:
    with file_of(data, rng.choice((".toml", ".yaml"))) as path:
        AccessRules.load(path).allow("a", Action.PUBLISH, "x")


def read_tokens(data: bytes, rng: random.Random) -> None:
    with file_of(data, ".json") as path:
        Tokens.load(path).check("a.b")


def _tokens() -> bytes:
    tokens, _ = Tokens().add("alice")
    return json.dumps({"tokens": [dataclasses.asdict(record) for record in tokens.records]}).encode()


def _bodies(frames: Sequence[bytes]) -> list[bytes]:
    return [frame[FRAME_HEADER_BYTES:] for frame in frames]


def library() -> list[bytes]:
    """The topologies that come with the project."""
    folder = Path(__file__).parents[2] / "topology" / "library"
    return [path.read_bytes() for path in sorted(folder.glob("*.yaml"))]


def _urgent_datagrams() -> list[bytes]:
    """A frame, and reports with and without frames ahead of a gap."""
    express = Express()
    return [
        express.send(1, b"x" * 60, 4, 5),
        express.report(3, set(), 10),
        express.report(3, {5, 6, 40}, 20),
    ]


def read_urgent_datagram(data: bytes, _: random.Random) -> None:
    """The payload of a datagram whose seal was genuine."""
    express = Express()
    for number in range(1, 50):
        express.send(number, b"x", 4, number)
    content = express.read(data, 10**9)
    if isinstance(content, Report):
        express.round_trip_of(content, 10**9)
        express.reported(content, 10**9)
    else:
        Numbers().take(content[0])


TARGETS = (
    Target("stream", STREAMS, read_stream, (), 16),
    Target("control", [frame[4:] for frame in STREAMS[: len(CONTROL)]], read_control, (ProtocolError,), 16),
    Target("heartbeat", [HEARTBEAT[FRAME_HEADER_BYTES:]], lambda data, _: _beat(data), (ProtocolError,)),
    Target("urgent-datagram", _urgent_datagrams(), read_urgent_datagram, (ProtocolError,), 8),
    Target("messages", _bodies(DATA), read_messages, (ProtocolError,), 8),
    Target("client-frame", _bodies(DATA), read_client_frame, (ProtocolError,), 8),
    Target("broker-frame", _bodies(DATA), read_broker_frame, (ProtocolError,), 8),
    Target("edge-frame", _bodies(DATA), read_edge_frame, (ProtocolError,), 8),
    Target(
        "datagram",
        [
            encode_datagram(Announcement("edge-1", "plant", "10.0.0.1:7400", "c1")),
            encode_datagram(Query("plant")),
        ],
        read_datagram,
        (ProtocolError,),
        8,
    ),
    Target(
        "names",
        [
            b"sub.plant.edge-1.00000000000000ff.d20000-l0",
            b"pub.plant.edge-1.00000000000000ff",
            b"10.0.0.1:7400",
            b"[::1]:80",
        ],
        read_names,
        (RecordError,),
    ),
    Target(
        "qos", [msgpack.packb(QOS.to_record()), msgpack.packb({"deadline_ms": 5.0})], read_qos, (QosError,)
    ),
    Target("seal", [str(Seal(7, bytes(32))).encode()], read_seal, ()),
    Target("record", [example for _, example in RECORDS], read_record, (RecordError,), 12),
    Target("trace", [segment(), SEGMENT_HEADER.encode()], read_trace, (TraceError,), 6),
    Target("topology", library(), read_topology, (TopologyError,), 1),
    Target("config", [CONFIG], read_config, (ConfigurationError,), 2),
    Target("rules", [RULES], read_rules, (ConfigurationError,), 2),
    Target("tokens", [_tokens()], read_tokens, (ConfigurationError,), 2),
)


def _beat(data: bytes) -> None:
    heartbeat = decode_heartbeat(data)
    assert encode_heartbeat(heartbeat)[FRAME_HEADER_BYTES:] == data
    assert encode_heartbeat(heartbeat)[4] == FrameKind.HEARTBEAT
