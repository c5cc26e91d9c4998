"""The documents tell what is true of the code."""

import importlib
import re
from pathlib import Path

from overlay.errors import CloseReason
from overlay.messages import PROTOCOL_VERSION, FrameKind

ROOT = Path(__file__).parent.parent
PACKAGES = "overlay|runtime|coordinator|clients|edge_broker|routing_broker|topology|spark_analysis|isthmus"


def resolve(name: str) -> object:
    """Import the longest module prefix of a dotted name and follow the rest as attributes."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[length:]:
            found = getattr(found, attribute)
        return found
    raise AssertionError(f"{name} cannot be imported")


def test_every_name_in_the_docs_exists():
    documents = [*ROOT.glob("docs/*.md"), ROOT / "README.md"]
    names = {
        name
        for document in documents
        for name in re.findall(rf"`((?:{PACKAGES})(?:\.\w+)+)`", document.read_text())
        if not name.endswith((".py", ".md", ".json"))
    }
    assert len(names) > 20
    for name in names:
        resolve(name)


def test_every_path_in_the_docs_exists():
    for document in [*ROOT.glob("docs/*.md"), ROOT / "README.md"]:
        for path in re.findall(r"`([\w/]+\.(?:py|md|yaml|toml|json))`", document.read_text()):
            if "/" in path:
                assert (ROOT / path).exists(), f"{document.name} names {path}"


def test_every_frame_is_documented():
    text = (ROOT / "docs/wire.md").read_text()
    for kind in FrameKind:
        assert re.search(rf"^\| {kind.value} \| {kind.name} \|", text, re.MULTILINE), kind.name


def test_the_version_of_the_protocol_is_documented():
    text = (ROOT / "docs/wire.md").read_text()
    assert f"\nVersion {PROTOCOL_VERSION}. " in text
    assert f"| `protocol` | u64 | {PROTOCOL_VERSION} |" in text


def test_every_link_between_documents_leads_somewhere():
    for document in [*ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "CHANGELOG.md"]:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_close_reasons_are_words():
    assert all(re.fullmatch(r"[a-z_]+", reason) for reason in CloseReason)
