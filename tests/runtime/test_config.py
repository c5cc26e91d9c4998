"""Settings: where they come from, which wins, and what is refused with which words."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.config import BrokerConfig, EdgeConfig, RouterConfig, listen_address, load_config
from runtime.errors import ConfigurationError
from runtime.hub import Pace


def _edge(file: Path | None = None, environment: dict[str, str] | None = None, **flags: Any) -> EdgeConfig:
    return load_config(EdgeConfig, "edge", file, {"lan": "plant"} | flags, environment or {})


def _write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def test_without_anything_a_broker_listens_on_loopback_only() -> None:
    config = load_config(RouterConfig, "router", environment={})
    assert config == RouterConfig()
    assert config.listen == "127.0.0.1:0"
    assert config.pace == Pace(10_000_000, 50_000_000)
    assert config.host


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("isthmus.toml", '[edge]\nid = "e1"\nsession_timeout_s = 6\ndiscovery = false\ndiscovery_port = 9\n'),
        (
            "isthmus.yaml",
            "edge:\n  id: e1\n  session_timeout_s: 6\n  discovery: false\n  discovery_port: 9\n",
        ),
    ],
)
def test_a_file_is_read_as_toml_or_yaml(tmp_path: Path, name: str, text: str) -> None:
    config = _edge(_write(tmp_path, name, text))
    assert (config.id, config.session_timeout_s, config.discovery, config.discovery_port) == (
        "e1",
        6.0,
        False,
        9,
    )


def test_the_environment_beats_the_file_and_flags_beat_both(tmp_path: Path) -> None:
    file = _write(tmp_path, "c.toml", '[edge]\nid = "file"\nchroot = "/file"\nzookeeper = "file:1"\n')
    environment = {"ISTHMUS_ID": "environment", "ISTHMUS_CHROOT": "/environment", "ISTHMUS_UNRELATED": "x"}
    config = _edge(file, environment, id="flag", zookeeper=None)
    assert (config.id, config.chroot, config.zookeeper) == ("flag", "/environment", "file:1")


def test_text_from_the_environment_becomes_numbers_and_truth_values() -> None:
    environment = {
        "ISTHMUS_SESSION_TIMEOUT_S": "7.5",
        "ISTHMUS_INSECURE": "yes",
        "ISTHMUS_DISCOVERY": "False",
        "ISTHMUS_DISCOVERY_PORT": "1234",
        "ISTHMUS_LISTEN": "0.0.0.0:7400",
    }
    config = _edge(environment=environment)
    assert (config.session_timeout_s, config.insecure, config.discovery) == (7.5, True, False)
    assert (config.discovery_port, config.listen) == (1234, "0.0.0.0:7400")


def test_the_quota_for_traces_comes_from_file_environment_or_flag(tmp_path: Path) -> None:
    file = _write(tmp_path, "c.toml", '[edge]\ntrace_dir = "t"\ntrace_quota_mb = 200\n')
    environment = {"ISTHMUS_TRACE_QUOTA_MB": "300"}
    found = [
        _edge(trace_dir="t"),
        _edge(file),
        _edge(file, environment),
        _edge(file, environment, trace_quota_mb=400),
    ]
    quotas = [config.tracing.quota_bytes for config in found if config.tracing is not None]
    assert quotas == [megabytes * 1024 * 1024 for megabytes in (1024, 200, 300, 400)]
    assert _edge().tracing is None


def test_the_real_environment_is_used_if_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISTHMUS_ID", "from-the-real-one")
    assert load_config(RouterConfig, "router").id == "from-the-real-one"


def test_a_file_without_the_section_changes_nothing(tmp_path: Path) -> None:
    assert _edge(_write(tmp_path, "c.toml", '[router]\nid = "r1"\n')) == _edge()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"lan": ""}, ["lan is not set", "--lan NAME"]),
        ({"lan": "a b"}, ["LAN name 'a b'", "use letters"]),
        ({"id": "-x"}, ["broker name '-x'", "use letters"]),
        ({"listen": "nowhere"}, ["listen is 'nowhere'", "give host:port, for example 127.0.0.1:7400"]),
        ({"listen": "a:²"}, ["listen is 'a:²'", "give host:port"]),
        ({"listen": "127.0.0.1:" + "9" * 5000}, ["give host:port"]),
        ({"http": "127.0.0.1:65536"}, ["http is '127.0.0.1:65536'"]),
        ({"listen": "0.0.0.0:7400"}, ["listen is 0.0.0.0:7400", "other hosts can reach", "--insecure"]),
        ({"http": "10.0.0.1:80"}, ["http is 10.0.0.1:80", "--insecure"]),
        ({"listen": "broker.example:7400"}, ["other hosts can reach"]),
        ({"advertise": "x"}, ["address 'x'", "port from 1 to 65535"]),
        ({"proxy": "x"}, ["address 'x'", "port from 1 to 65535"]),
        ({"heartbeat_ms": 0.5}, ["heartbeat_ms is 0.5", "1 to 10000 ms apart"]),
        ({"heartbeat_ms": 20_000, "silence_ms": 90_000}, ["heartbeat_ms is 20000", "1 to 10000 ms apart"]),
        ({"heartbeat_ms": 20}, ["silence_ms 50", "must allow three"]),
        ({"heartbeat_ms": "nan"}, ["--heartbeat-ms is 'nan'", "give a number"]),
        ({"silence_ms": float("inf")}, ["--silence-ms is inf", "give a number"]),
        ({"heartbeat_ms": True}, ["--heartbeat-ms is True", "give a number"]),
        ({"session_timeout_s": 0.5}, ["session_timeout_s is 0.5", "between 1 and 60"]),
        ({"session_timeout_s": "soon"}, ["--session-timeout-s is 'soon'", "give a number"]),
        ({"session_timeout_s": [4]}, ["--session-timeout-s is [4]", "give a number"]),
        ({"discovery_port": "x"}, ["--discovery-port is 'x'", "a whole number"]),
        ({"discovery_port": 7.5}, ["--discovery-port is 7.5", "a whole number"]),
        ({"discovery_port": 70_000}, ["discovery_port is 70000", "from 1 to 65535"]),
        ({"discovery_group": "10.0.0.1"}, ["discovery_group is '10.0.0.1'", "IPv4 multicast address"]),
        ({"discovery_group": "x"}, ["discovery_group is 'x'", "for example 239.255.74.0"]),
        ({"discovery": "perhaps"}, ["--discovery is 'perhaps'", "true or false"]),
        ({"log_level": "loud"}, ["log_level is 'loud'", "use debug, info, warning or error"]),
        ({"log_style": "xml"}, ["log_style is 'xml'", "use text or json"]),
        ({"zookeeper": 2181}, ["--zookeeper is 2181", "give text"]),
        ({"retained_mb": 15}, ["retained_mb is 15", "at least 16"]),
        ({"trace_quota_mb": 127}, ["trace_quota_mb is 127", "at least 128", "trace_sample"]),
        ({"trace_quota_mb": -1}, ["trace_quota_mb is -1", "at least 128"]),
        ({"trace_quota_mb": "1 GB"}, ["--trace-quota-mb is '1 GB'", "a whole number"]),
    ],
)
def test_a_bad_setting_is_refused_with_its_value_and_what_would_do(
    flags: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        _edge(**flags)
    for word in words:
        assert word in str(caught.value)


def test_where_a_bad_setting_came_from_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="environment ISTHMUS_INSECURE is 'perhaps'"):
        _edge(environment={"ISTHMUS_INSECURE": "perhaps"})
    file = _write(tmp_path, "c.toml", "[edge]\ndiscovery_port = true\n")
    with pytest.raises(
        ConfigurationError, match=r"c\.toml: edge\.discovery_port is True: give a whole number"
    ):
        _edge(file)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("c.toml", "[edge\n", "not TOML or YAML"),
        ("c.yaml", "edge: [", "not TOML or YAML"),
        ("c.yaml", "- edge\n", r"\[edge\] must be a table of settings"),
        ("c.yaml", "edge: 5\n", r"\[edge\] must be a table of settings"),
        (
            "c.toml",
            '[edge]\ncolour = "blue"\n',
            r"\[edge\] has unknown setting 'colour': known are id, listen",
        ),
        ("c.yaml", "edge:\n  1: 2\n", r"\[edge\] has unknown setting 1"),
    ],
)
def test_a_bad_file_is_refused_with_its_name(tmp_path: Path, name: str, text: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"{name}: {words}"):
        _edge(_write(tmp_path, name, text))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"gone\.toml: cannot be read: No such file"):
        _edge(tmp_path / "gone.toml")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match=r"binary\.toml: not TOML or YAML"):
        _edge(binary)


def test_a_router_may_count_as_another_host() -> None:
    config = load_config(RouterConfig, "router", flags={"host_label": "rack-1"}, environment={})
    assert config.host == "rack-1"


@given(st.text())
def test_any_listen_address_is_read_or_refused(text: str) -> None:
    try:
        host, port = listen_address("listen", text)
    except ConfigurationError:
        return
    assert host is not None
    assert 0 <= port < 65536


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("127.0.0.1:0", "127.0.0.1", 0), ("[::1]:7400", "::1", 7400), ("localhost:1", "localhost", 1)],
)
def test_a_listen_address_is_split(text: str, host: str, port: int) -> None:
    assert listen_address("listen", text) == (host, port)
    assert BrokerConfig(listen=text).check() is None


_settings = st.sampled_from([field for field in EdgeConfig.__dataclass_fields__ if field != "lan"])
_values = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.lists(st.integers(), max_size=1)
)


@given(st.dictionaries(_settings, _values, max_size=4))
def test_whatever_the_flags_there_is_a_usable_configuration_or_a_configuration_error(
    flags: dict[str, Any],
) -> None:
    try:
        config = _edge(**flags)
    except ConfigurationError:
        return
    config.check()
    assert config.pace.heartbeat_ns >= 1_000_000


@pytest.mark.parametrize("ppm", [0, -1, 10_001])
def test_a_drift_no_clock_has_is_refused(ppm: int) -> None:
    with pytest.raises(ConfigurationError, match=rf"clock_drift_ppm is {ppm}: .*1 to 10000.*doctor --clock"):
        load_config(RouterConfig, "router", flags={"clock_drift_ppm": ppm}, environment={})
