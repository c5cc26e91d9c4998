"""Addresses of nodes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlay.errors import InvalidNameError, show
from overlay.locator import Locator


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("10.0.0.7:7400", "10.0.0.7", 7400),
        ("[::1]:7400", "::1", 7400),
        (" broker.example:1 ", "broker.example", 1),
        ("a:65535", "a", 65535),
    ],
)
def test_an_address_is_read(text: str, host: str, port: int) -> None:
    assert Locator.parse(text) == (host, port)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        ":1",
        "a:",
        "a:0",
        "a:65536",
        "a:-1",
        "a:+1",
        "a:1.0",
        "a:²",
        "::1:7400",
        "[]:1",
        "a b:1",
        "a\r\nHost: b:1",
        "a:" + "9" * 5000,
    ],
)
def test_a_bad_address_is_refused_with_the_address_the_limit_and_an_example(text: str) -> None:
    with pytest.raises(InvalidNameError) as caught:
        Locator.parse(text)
    assert show(text) in str(caught.value)
    assert "from 1 to 65535" in str(caught.value)
    assert "10.0.0.7:7400" in str(caught.value)


@given(st.one_of(st.ip_addresses().map(str), st.just("broker.example")), st.integers(1, 65535))
def test_an_address_written_and_read_is_the_same(host: str, port: int) -> None:
    assert Locator.parse(str(Locator(host, port))) == Locator(host, port)


@given(st.text(st.sampled_from("a0:[] .\n"), max_size=12))
def test_any_text_is_either_an_address_that_can_be_written_back_or_refused(text: str) -> None:
    try:
        locator = Locator.parse(text)
    except InvalidNameError:
        return
    assert Locator.parse(str(locator)) == locator
