"""Whoever wants to know how a run on the testbed goes."""


class Observer:
    """Told what happens; the command line shows it."""

    def say(self, text: str) -> None:
        """Something happened."""

    def progress(self, text: str) -> None:
        """What is going on right now."""
