"""How property tests run: quick by default, `ISTHMUS_HYPOTHESIS=thorough` for a long search.

A failure prints a `@reproduce_failure` line that replays it.
"""

import os

from hypothesis import settings

settings.register_profile("quick", deadline=None, print_blob=True, max_examples=60, stateful_step_count=40)
settings.register_profile(
    "thorough", deadline=None, print_blob=True, max_examples=500, stateful_step_count=100
)


def use_profile() -> None:
    """Load the profile the environment asks for."""
    settings.load_profile(os.environ.get("ISTHMUS_HYPOTHESIS", "quick"))
