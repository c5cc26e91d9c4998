"""Compiled modules are found beside their sources, and told apart from older ones."""

import os
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

import overlay
from runtime.compiled import compiled_modules, stale_modules


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for package in ("overlay", "edge_broker", "routing_broker"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "core.py").write_text("")
    monkeypatch.setattr(overlay, "__path__", [str(tmp_path / "overlay")])
    return tmp_path


def test_without_compiled_modules_there_are_none(tree: Path) -> None:
    assert compiled_modules() == {}
    assert stale_modules() == []


def test_a_compiled_module_is_stale_once_its_source_is_newer(tree: Path) -> None:
    file = tree / "edge_broker" / f"core{EXTENSION_SUFFIXES[0]}"
    file.write_text("")
    source = tree / "edge_broker" / "core.py"
    os.utime(source, (1_000, 1_000))
    assert compiled_modules() == {"edge_broker.core": file}
    assert stale_modules() == []
    os.utime(file, (999, 999))
    assert stale_modules() == ["edge_broker.core"]
