"""Names of brokers, LANs and topics."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlay.errors import InvalidNameError
from overlay.limits import NAME_MAX_CHARACTERS, TOPIC_MAX_BYTES
from overlay.names import check_name, check_topic


@pytest.mark.parametrize("name", ["a", "7", "edge-a", "Plant_7", "a" * NAME_MAX_CHARACTERS])
def test_usable_names_come_back_unchanged(name: str) -> None:
    assert check_name("LAN", name) == name


@pytest.mark.parametrize("name", ["", "-a", "_a", "a b", "a/b", "ä", "a\n", "..", "a.b", "²"])
def test_an_unusable_name_is_refused_with_the_name_and_the_remedy(name: str) -> None:
    with pytest.raises(InvalidNameError) as caught:
        check_name("LAN", name)
    assert repr(name) in str(caught.value)
    assert str(caught.value).startswith("LAN name")
    assert "use letters, digits" in str(caught.value)


def test_a_long_name_is_refused_with_its_length_the_limit_and_the_remedy() -> None:
    with pytest.raises(InvalidNameError, match=r"broker name has 65 characters, at most 64 .* shorten it"):
        check_name("broker", "a" * (NAME_MAX_CHARACTERS + 1))


@pytest.mark.parametrize(
    "topic", ["a", "plant/7/temperature", "größe", "two words", "/", "..", "日本", "a" * TOPIC_MAX_BYTES]
)
def test_usable_topics_come_back_unchanged(topic: str) -> None:
    assert check_topic(topic) == topic


@pytest.mark.parametrize("topic", ["", " ", " a", "a ", "a\nb", "a\0", "\ud800", "a\x7f"])
def test_an_unusable_topic_is_refused_with_the_topic_and_the_remedy(topic: str) -> None:
    with pytest.raises(InvalidNameError) as caught:
        check_topic(topic)
    assert repr(topic) in str(caught.value)
    assert "give printable text" in str(caught.value)


def test_the_topic_limit_counts_bytes_and_not_characters() -> None:
    with pytest.raises(InvalidNameError, match=r"has 256 bytes, at most 255 .* shorten it"):
        check_topic("ä" * 128)


@given(st.text())
def test_any_text_is_either_a_topic_that_encodes_within_the_limit_or_refused(text: str) -> None:
    try:
        topic = check_topic(text)
    except InvalidNameError:
        return
    assert topic == text
    assert 0 < len(topic.encode()) <= TOPIC_MAX_BYTES


@given(st.text())
def test_any_text_is_either_a_name_safe_in_paths_and_logs_or_refused(text: str) -> None:
    try:
        name = check_name("broker", text)
    except InvalidNameError:
        return
    assert name.isascii()
    assert len(name) <= NAME_MAX_CHARACTERS
    assert name.replace("-", "").replace("_", "").isalnum()
