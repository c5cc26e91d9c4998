"""Rules of access and tokens: what is allowed, what is denied, and files that change."""

import json
import os
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlay.errors import AccessDeniedError, CloseReason, ProtocolError
from overlay.messages import Hello, Role
from runtime.access import Access, AccessRules, Action
from runtime.errors import ConfigurationError
from runtime.link import Principal
from runtime.tls import CertificateName
from runtime.tokens import Tokens

RULES = """
[[rule]]
principals = ["sensor-*", "alice"]
publish = ["plant/*/temperature", "alarm"]

[[rule]]
principals = ["control"]
subscribe = ["plant/**"]
publish = ["plant/valves/**"]
declare = ["plant/valves/**"]

[[rule]]
principals = ["*"]
subscribe = ["public/**"]
"""

PUBLISH, SUBSCRIBE, DECLARE = Action


def rules(text: str = RULES) -> AccessRules:
    return AccessRules.parse(tomllib.loads(text), "rules")


@pytest.mark.parametrize(
    ("principal", "allowed"),
    [
        ("sensor-7", {(PUBLISH, "plant/3/temperature"), (PUBLISH, "alarm"), (SUBSCRIBE, "public/news")}),
        ("alice", {(PUBLISH, "plant/3/temperature"), (PUBLISH, "alarm"), (SUBSCRIBE, "public/news")}),
        (
            "control",
            {
                (SUBSCRIBE, "plant/3/temperature"),
                (SUBSCRIBE, "plant/3/4/temperature"),
                (SUBSCRIBE, "plant/3/temperature/x"),
                (SUBSCRIBE, "plant/valves/1/open"),
                (PUBLISH, "plant/valves/1/open"),
                (DECLARE, "plant/valves/1/open"),
                (SUBSCRIBE, "public/news"),
            },
        ),
        ("stranger", {(SUBSCRIBE, "public/news")}),
        ("sensor", {(SUBSCRIBE, "public/news")}),
    ],
)
def test_the_matrix_of_principals_actions_and_topics(
    principal: str, allowed: set[tuple[Action, str]]
) -> None:
    topics = (
        "plant/3/temperature",
        "plant/3/4/temperature",
        "plant/3/temperature/x",
        "plant/valves/1/open",
        "alarm",
        "alarms",
        "public/news",
        "public",
        "secret",
    )
    found = {
        (action, topic) for action in Action for topic in topics if rules().allow(principal, action, topic)
    }
    assert found == allowed


@given(st.text(max_size=20), st.sampled_from(list(Action)), st.text(max_size=40))
def test_without_rules_nothing_is_allowed(principal: str, action: Action, topic: str) -> None:
    assert not AccessRules().allow(principal, action, topic)


@given(st.text(alphabet="ab/.[$^\n", min_size=1, max_size=12), st.text(alphabet="ab/.[$^\n", max_size=12))
def test_a_pattern_without_stars_means_itself_and_nothing_else(pattern: str, topic: str) -> None:
    parsed = AccessRules.parse({"rule": [{"principals": ["p"], "publish": [pattern]}]}, "rules")
    assert parsed.allow("p", PUBLISH, topic) is (topic == pattern)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([], "expected a list of `rule`"),
        ({"rules": []}, "expected a list of `rule`"),
        ({"rule": "all"}, "must be a list"),
        ({"rule": [{"principal": ["a"]}]}, "rule 1 is"),
        ({"rule": [{"publish": ["a"]}]}, "names no principals"),
        ({"rule": [{"principals": "a"}]}, "expected a list of patterns"),
        ({"rule": [{"principals": ["a"], "publish": [1]}]}, "rule 1: publish is"),
        ({"rule": [{"principals": ["a"], "publish": [""]}]}, "expected a list of patterns"),
    ],
)
def test_a_file_that_is_not_understood_allows_nothing_by_accident(content: object, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        AccessRules.parse(content, "rules")


# Tokens


def test_a_token_proves_its_principal_until_it_is_revoked(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    tokens, token = Tokens().add("alice")
    tokens, other = tokens.add("bob")
    tokens.save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert token.partition(".")[2] not in path.read_text()
    loaded = Tokens.load(path)
    records = [loaded.check(each) for each in (token, other)]
    assert [record.principal for record in records if record is not None] == ["alice", "bob"]
    revoked = loaded.revoke(token.partition(".")[0])
    assert revoked.check(token) is None
    assert revoked.check(other) is not None
    assert not revoked.counts(token.partition(".")[0])


@given(st.text(max_size=80))
def test_no_other_text_is_a_token(text: str) -> None:
    tokens, token = Tokens().add("alice")
    assert tokens.check(text) is None
    assert tokens.check(f"{token.partition('.')[0]}.{text}") is None
    assert tokens.check(token + "x") is None


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"tokens": 1}', '{"tokens": [{"id": "x"}]}', '{"tokens": [7]}', "[" * 100_000]
)
def test_a_file_that_holds_no_tokens_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=r"tokens\.json"):
        Tokens.load(path)


def test_unknown_tokens_and_names_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="there is no token 'x'"):
        Tokens().revoke("x")
    with pytest.raises(ConfigurationError, match="principal name 'a b'"):
        Tokens().add("a b")


# Both together


def hello(token: str = "") -> Hello:
    return Hello(Role.CLIENT, "c", 1, 200_000_000, token=token)


def test_a_client_is_who_its_certificate_or_token_says(tmp_path: Path) -> None:
    (tmp_path / "access.toml").write_text(RULES)
    tokens, token = Tokens().add("control")
    tokens.save(tmp_path / "tokens.json")
    access = Access(tmp_path / "access.toml", tmp_path / "tokens.json")
    assert access.authenticate(hello(), CertificateName(Role.CLIENT, "alice")) == Principal("alice")
    control = access.authenticate(hello(token), None)
    assert control == Principal("control", token.partition(".")[0])
    access.check(control, SUBSCRIBE, "plant/x")
    with pytest.raises(AccessDeniedError, match="control may not publish plant/x: no rule"):
        access.check(control, PUBLISH, "plant/x")
    for stranger in (hello(), hello("made.up"), hello(token[:-1])):
        with pytest.raises(ProtocolError) as refused:
            access.authenticate(stranger, None)
        assert refused.value.reason is CloseReason.WRONG_IDENTITY
    with pytest.raises(ProtocolError):  # a broker's certificate makes nobody a client
        access.authenticate(hello(), CertificateName(Role.EDGE, "alice"))
    assert access.statistics().denied == {"publish": 1, "connect": 4}


def test_files_are_read_again_when_they_change_and_kept_when_they_are_broken(tmp_path: Path) -> None:
    path = tmp_path / "access.toml"
    path.write_text(RULES)
    access = Access(path)
    assert not access.refresh()
    draft = tmp_path / "draft"
    draft.write_text('[[rule]]\nprincipals = ["alice"]\npublish = ["x"]\n')
    draft.replace(path)
    assert access.refresh()
    assert access.may(Principal("alice"), PUBLISH, "x")
    assert not access.may(Principal("alice"), PUBLISH, "alarm")
    path.write_text("[[rule]")
    assert not access.refresh()
    assert access.may(Principal("alice"), PUBLISH, "x")
    assert "not TOML" in access.statistics().problem
    path.unlink()
    assert not access.refresh()
    assert "cannot be read" in access.statistics().problem
    path.write_text("")
    os.utime(path, ns=(1, 1))
    assert access.refresh()
    assert not access.may(Principal("alice"), PUBLISH, "x")
    assert access.statistics().problem == ""
    assert json.loads(json.dumps(access.statistics().denied)) == {}


def test_a_broker_does_not_start_without_its_rules(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        Access(tmp_path / "missing.toml")
