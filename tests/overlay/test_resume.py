"""What a RESUME frame may say."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlay.errors import CloseReason, ProtocolError
from overlay.limits import RESUME_PUBLISHERS_MAX
from overlay.messages import Resume
from overlay.qos import NO_REQUEST, SubscriptionQos
from overlay.resume import check_sender, positions_of, read_resume

u64 = st.integers(0, 2**64 - 1)


def test_an_edge_tells_of_its_own_subscribers_only() -> None:
    message = Resume("t", 1, "plant", "e1")
    check_sender(message, "e1", "plant")
    for edge, lan in (("e2", "plant"), ("e1", "office")):
        with pytest.raises(ProtocolError, match=f"edge {edge} of LAN {lan} speaks for edge e1 of LAN plant"):
            check_sender(message, edge, lan)


@given(st.dictionaries(u64, u64))
def test_positions_come_in_pairs(positions: dict[int, int]) -> None:
    flat = [number for pair in positions.items() for number in pair]
    assert positions_of(flat) == positions
    with pytest.raises(ProtocolError, match="no pairs"):
        positions_of([*flat, 1])


def test_no_more_positions_are_taken_than_a_client_names() -> None:
    most = [number for publisher in range(RESUME_PUBLISHERS_MAX) for number in (publisher, 7)]
    assert len(positions_of(most)) == RESUME_PUBLISHERS_MAX
    with pytest.raises(ProtocolError, match=f"at most {RESUME_PUBLISHERS_MAX}"):
        positions_of([*most, 2**63, 7])


@given(
    st.dictionaries(
        st.text() | st.sampled_from(["deadline_ms", "loss_tolerance"]), st.none() | st.text() | u64
    )
)
def test_whatever_is_asked_for_is_understood_or_refused(request: dict[str, Any]) -> None:
    try:
        assert isinstance(read_resume(Resume("t", 1, "plant", "e1", request))[1], SubscriptionQos)
    except ProtocolError as error:
        assert error.reason is CloseReason.BAD_MESSAGE


def test_most_ask_for_nothing() -> None:
    assert read_resume(Resume("t", 1, "plant", "e1")) == ({}, NO_REQUEST)
    asked = SubscriptionQos(deadline_ms=5.0)
    assert read_resume(Resume("t", 1, "plant", "e1", asked.to_record(), (4, 9))) == ({4: 9}, asked)


@pytest.mark.parametrize(
    "message",
    [
        Resume("t", 1, "*", "e1"),
        Resume("t", 1, "plant", ""),
        Resume("t", 2**63, "plant", "e1"),
        Resume("t", 1, "plant", "e1", positions=(1, 2, 3)),
    ],
    ids=["LAN", "edge", "endpoint", "positions"],
)
def test_what_nobody_could_register_is_not_passed_on(message: Resume) -> None:
    with pytest.raises(ProtocolError) as caught:
        read_resume(message)
    assert caught.value.reason is CloseReason.BAD_MESSAGE
