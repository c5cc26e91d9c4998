"""Records and paths: they survive the way through a znode, and nonsense raises RecordError only."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator import (
    EdgeRecord,
    Endpoint,
    EndpointKind,
    FlagRecord,
    RecordError,
    RouterRecord,
    TopicRecord,
    paths,
    requests_of,
)
from coordinator.records import ClusterRecord, EpochRecord, decode_candidate, encode_candidate
from overlay.bounds import Delays
from overlay.errors import InvalidNameError
from overlay.limits import ENDPOINT_ID_MAX
from overlay.qos import BEST_EFFORT, NO_REQUEST, SubscriptionQos, TopicQos

names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", fullmatch=True)
topics = st.text(min_size=1, max_size=60).filter(
    lambda text: text.isprintable() and text == text.strip() and len(text.encode()) <= 255
)
READERS = (
    ClusterRecord.from_json,
    RouterRecord.from_json,
    EdgeRecord.from_json,
    TopicRecord.from_json,
    EpochRecord.from_json,
    FlagRecord.from_json,
    decode_candidate,
)
SAMPLES: tuple[Any, ...] = (
    ClusterRecord("c"),
    RouterRecord("r1", "h:1", "h", 2.0, True, 5.5, "h:2", 7, Delays(1, 2, 3, 4)),
    EdgeRecord("e1", "h:1", "lan", "h", "h:2"),
    TopicRecord(1, "t/ü", TopicQos(deadline_ms=5.0), "r1", None, 3),
    EpochRecord(4, "r1", "candidate-1"),
    FlagRecord("t", "r1", "too far away"),
)


@pytest.mark.parametrize("record", SAMPLES, ids=lambda record: type(record).__name__)
def test_a_record_survives(record: Any) -> None:
    assert type(record).from_json(record.to_json()) == record


def test_the_layout_is_the_documented_one() -> None:
    assert json.loads(SAMPLES[1].to_json()) == {
        "id": "r1",
        "locator": "h:1",
        "host": "h",
        "capacity": 2.0,
        "draining": True,
        "load": {"messages_per_s": 5.5, "topics": 7},
        "http": "h:2",
        "delays": {
            "publisher_to_primary_ns": 1,
            "primary_to_subscriber_ns": 2,
            "primary_to_backup_ns": 3,
            "failover_ns": 4,
        },
    }
    assert "t/ü" in SAMPLES[3].to_json().decode()
    assert json.loads(SAMPLES[0].to_json()) == {"cluster": "c", "format": 1}
    assert decode_candidate(encode_candidate("r1")) == "r1"


@given(names, topics, names, st.sampled_from([TopicQos(), BEST_EFFORT]), st.integers(0, 2**40))
def test_topic_records_survive(primary: str, name: str, backup: str, qos: TopicQos, epoch: int) -> None:
    record = TopicRecord(1, name, qos, primary, backup, epoch)
    assert TopicRecord.from_json(record.to_json()) == record


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.one_of(st.binary(max_size=60), plain.map(lambda value: json.dumps(value).encode())))
def test_nonsense_raises_record_error_only(data: bytes) -> None:
    for read in READERS:
        with pytest.raises(RecordError):
            read(data)


@pytest.mark.parametrize("record", SAMPLES, ids=lambda record: type(record).__name__)
@given(data=st.data())
def test_a_record_with_one_field_spoilt_raises_record_error_or_is_read(record: Any, data: Any) -> None:
    fields = json.loads(record.to_json())
    spoilt = data.draw(st.sampled_from(sorted(fields)))
    if data.draw(st.booleans()):
        del fields[spoilt]
    else:
        fields[spoilt] = data.draw(plain)
    try:
        type(record).from_json(json.dumps(fields).encode())
    except RecordError:
        return


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"capacity": 0.0}, "capacity of router r is 0.0: it must be above 0"),
        ({"messages_per_s": -1.0}, "messages_per_s of router r is -1.0"),
        ({"topics": -1}, "topics of router r is -1"),
    ],
)
def test_records_that_make_no_sense_cannot_be_made(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(RecordError, match=match):
        RouterRecord("r", "h:1", "h", **fields)


def test_errors_name_the_field_and_what_was_found() -> None:
    with pytest.raises(RecordError, match="router record has no field 'load': it has capacity"):
        RouterRecord.from_json(b'{"capacity": 1}')
    with pytest.raises(RecordError, match=r"not JSON"):
        TopicRecord.from_json(b"{")
    with pytest.raises(RecordError, match="id of topic 't' is 0: it must be 1 to"):
        TopicRecord(0, "t", TopicQos(), None, None, 0)


@given(st.sampled_from(EndpointKind), names, names, st.integers(0, ENDPOINT_ID_MAX))
def test_endpoint_names_survive(kind: EndpointKind, lan: str, edge: str, endpoint_id: int) -> None:
    endpoint = Endpoint(kind, lan, edge, endpoint_id)
    assert Endpoint.parse(endpoint.name) == endpoint


def test_an_endpoint_name_looks_like_this() -> None:
    assert Endpoint(EndpointKind.PUBLISHER, "plant-1", "e_2", 255).name == "pub.plant-1.e_2.00000000000000ff"


_requests = st.builds(
    SubscriptionQos,
    deadline_ms=st.none() | st.integers(1, 10**13).map(lambda microseconds: microseconds / 1000),
    loss_tolerance=st.none() | st.integers(0, 2**31),
)


@given(names, names, _requests)
def test_what_a_subscriber_asks_for_survives_in_its_name(
    lan: str, edge: str, request: SubscriptionQos
) -> None:
    endpoint = Endpoint(EndpointKind.SUBSCRIBER, lan, edge, 7, request)
    assert Endpoint.parse(endpoint.name) == endpoint
    assert requests_of([endpoint, Endpoint(EndpointKind.PUBLISHER, lan, edge, 8)]) == (
        {request} if request != NO_REQUEST else set()
    )


def test_a_name_with_a_request_looks_like_this() -> None:
    asked = {
        SubscriptionQos(20, 0): ".d20000-l0",
        SubscriptionQos(0.5): ".d500",
        SubscriptionQos(loss_tolerance=3): ".l3",
        NO_REQUEST: "",
    }
    for request, suffix in asked.items():
        name = Endpoint(EndpointKind.SUBSCRIBER, "b", "eb", 1, request).name
        assert name == f"sub.b.eb.0000000000000001{suffix}"


@pytest.mark.parametrize(
    "request_text", ["", "x", "d", "d0", "l", "-", "d5-", "-l5", "d05", "d5l5", "l5-d5", "d99999999999999999"]
)
def test_other_requests_are_no_names(request_text: str) -> None:
    with pytest.raises(RecordError, match="endpoint name is"):
        Endpoint.parse(f"sub.b.eb.0000000000000001.{request_text}")


def test_a_publisher_asks_for_nothing() -> None:
    with pytest.raises(RecordError, match="a publisher asks for nothing"):
        Endpoint.parse("pub.b.eb.0000000000000001.d20000")


@given(st.one_of(st.text(max_size=40), st.from_regex(r"(pub|sub)\.[a-z]\.[a-z]\..{16}", fullmatch=True)))
def test_other_names_are_no_endpoints(name: str) -> None:
    try:
        endpoint = Endpoint.parse(name)
    except RecordError:
        return
    assert endpoint.name == name


@given(topics)
def test_topic_names_survive_quoting_into_one_znode_name(topic: str) -> None:
    node = paths.quote_topic(topic)
    assert "/" not in node
    assert node.isascii()
    assert node not in {".", ".."}
    assert paths.unquote_topic(node) == topic


@pytest.mark.parametrize("topic", [".", "..", "...", "a/b", "%2F", "zookeeper", "/", "ü 🚀"])
def test_awkward_topic_names(topic: str) -> None:
    assert paths.unquote_topic(paths.quote_topic(topic)) == topic


@given(st.text(max_size=20))
def test_a_znode_name_is_that_of_one_topic_or_of_none(node: str) -> None:
    topic = paths.unquote_topic(node)
    assert topic is None or paths.quote_topic(topic) == node
    assert paths.unquote_topics([node]) == ({topic} if topic is not None else set())


def test_names_that_cannot_be_used_are_refused() -> None:
    with pytest.raises(InvalidNameError):
        paths.topic_path("")
    with pytest.raises(InvalidNameError):
        paths.router_path("../escape")
    with pytest.raises(InvalidNameError):
        paths.topic_path("x" * 256)
