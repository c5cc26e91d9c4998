"""Well-formed containers with hostile content: whatever fields and values, only the declared errors."""

import json
import os
import random
from contextlib import suppress
from dataclasses import asdict
from struct import pack

import msgpack
import yaml
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from overlay.codec import decode
from overlay.errors import ProtocolError
from overlay.messages import FrameKind
from overlay.trace import MAGIC, RECORD_BYTES, BlockKind, encode_block
from tests.fuzz.targets import CONFIG, CONTROL, RECORDS, SEGMENT_HEADER, TARGETS, library

SEED = int(os.environ.get("ISTHMUS_FUZZ_SEED", "1"))
INPUTS = int(os.environ.get("ISTHMUS_FUZZ_INPUTS", "4000"))
EXAMPLES = settings(
    max_examples=max(20, INPUTS // 200),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate, Phase.shrink],
    print_blob=True,
)
READERS = {target.name: target for target in TARGETS}
FIELDS = sorted(
    {name for message in CONTROL for name in message.__dataclass_fields__}
    | {name for _, example in RECORDS for name in json.loads(example)}
    | {"version", "kind", "announcement", "query", "tokens", "rule", "principals", "publish"}
    | {
        "name",
        "topic",
        "peer",
        "deadline_ns",
        "wall_ns",
        "pid",
        "sampling",
        "lans",
        "routers",
        "topics",
        "links",
        "publishers",
        "subscribers",
        "zookeeper",
        "edges",
    }
)
NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.sampled_from([0, -1, 2**31, 2**32, 2**53, 2**63, 2**64 - 1])
SCALARS = st.none() | st.booleans() | NUMBERS | st.floats() | st.text(max_size=20) | st.sampled_from(FIELDS)
NAMES = st.sampled_from(FIELDS) | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=6,
)
MAPS = st.dictionaries(NAMES, VALUES, max_size=8)


def read(name: str, data: bytes) -> None:
    target = READERS[name]
    with suppress(*target.errors):
        target.read(data, random.Random(0))


@seed(SEED)
@EXAMPLES
@given(st.sampled_from(list(FrameKind)), VALUES | MAPS)
def test_control_frames_with_any_content(kind: FrameKind, content: object) -> None:
    with suppress(ProtocolError):
        decode(kind, msgpack.packb(content))


@seed(SEED)
@EXAMPLES
@given(MAPS)
def test_datagrams_with_any_content(content: dict[str, object]) -> None:
    read("datagram", b"ISTH" + msgpack.packb({"version": 1, **content}))


@seed(SEED)
@EXAMPLES
@given(st.integers(0, len(RECORDS) - 1), MAPS, st.booleans())
def test_records_with_any_content(which: int, content: dict[str, object], complete: bool) -> None:
    reader, example = RECORDS[which]
    fields = {**json.loads(example), **content} if complete else content
    with suppress(*READERS["record"].errors):
        reader(json.dumps(fields).encode())


@seed(SEED)
@EXAMPLES
@given(st.sampled_from(library()), st.lists(st.tuples(st.integers(0, 200), VALUES), max_size=3))
def test_topologies_with_values_replaced(text: bytes, changes: list[tuple[int, object]]) -> None:
    document = yaml.safe_load(text)
    for number, value in changes:
        places = _places(document)
        container, key = places[number % len(places)]
        container[key] = value
    read("topology", json.dumps(document).encode())


@seed(SEED)
@EXAMPLES
@given(MAPS, MAPS)
def test_configurations_with_any_content(edge: dict[str, object], router: dict[str, object]) -> None:
    assert CONFIG
    read("config", yaml.safe_dump({"edge": {"lan": "a", **edge}, "router": router}).encode())


@seed(SEED)
@EXAMPLES
@given(VALUES, MAPS)
def test_rules_and_tokens_with_any_content(value: object, content: dict[str, object]) -> None:
    read("rules", yaml.safe_dump({"rule": [{"principals": ["a"], **content}, value]}).encode())
    read("tokens", json.dumps({"tokens": [content, value]}).encode())


@seed(SEED)
@EXAMPLES
@given(MAPS, MAPS, MAPS, st.binary(max_size=200))
def test_traces_with_any_content(
    header: dict[str, object], topic: dict[str, object], peer: dict[str, object], records: bytes
) -> None:
    """Checksums are right, so that everything is read."""
    names = [field for field in header if field in SEGMENT_HEADER.__dataclass_fields__]
    packed = msgpack.packb({**asdict(SEGMENT_HEADER), **{name: header[name] for name in names}})
    entry = {"topic": 3, "name": "t", "deadline_ns": 1, "loss_tolerance": 2, "period_ns": 3, **topic}
    blocks = [
        encode_block(BlockKind.TOPIC, msgpack.packb(entry)),
        encode_block(BlockKind.PEER, msgpack.packb({"peer": 1, "name": "p", **peer})),
        encode_block(BlockKind.RECORDS, (records + bytes(RECORD_BYTES))[:RECORD_BYTES]),
    ]
    read("trace", MAGIC + pack("<I", len(packed)) + packed + b"".join(blocks))


def _places(value: object) -> list[tuple[dict[object, object] | list[object], object]]:
    """Every container of a document with each of its keys."""
    found: list[tuple[dict[object, object] | list[object], object]] = []
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            found += [(value, key), *_places(value[key])]
    return found
