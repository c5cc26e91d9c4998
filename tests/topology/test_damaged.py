"""Whatever is done to a file, reading it ends in a topology or in an error for people."""

import random

import pytest

from topology.errors import InvalidTopologyError
from topology.graph import warnings
from topology.model import library, parse_topology

WORDS = (
    *("null", "[]", "{}", "1", "-1", "1e400", '"x"', "a", "cloud", "[a, b]", "{a: b}", ".inf", "2001-01-01"),
    *("!!python/object:x", "&a", "*a", "? x", "<<: {}", "true"),
)
MARKS = ":{}[],-#\n \t&*!|>'\"%@`0a\u2028"


def damaged(chance: random.Random, text: str) -> str:
    for _ in range(chance.randint(1, 4)):
        kind = chance.randrange(3)
        if kind == 0:
            lines = text.split("\n")
            del lines[chance.randrange(len(lines))]
            text = "\n".join(lines)
        elif kind == 1:
            at = chance.randrange(len(text))
            text = text[:at] + chance.choice(MARKS) + text[at + 1 :]
        else:
            parts = text.split(": ")
            at = chance.randrange(len(parts))
            _, comma, rest = parts[at].partition(",")
            parts[at] = chance.choice(WORDS) + comma + rest
            text = ": ".join(parts)
    return text


@pytest.mark.parametrize("seed", range(3))
def test_damaged_files_are_refused_with_words_or_read(seed: int) -> None:
    chance = random.Random(seed)
    texts = list(library().values())
    refused = 0
    for _ in range(30):
        try:
            topology = parse_topology(damaged(chance, chance.choice(texts)))
        except InvalidTopologyError as error:
            refused += 1
            assert str(error).startswith("topology")
        else:
            warnings(topology)
    assert refused > 5
