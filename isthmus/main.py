"""`isthmus`: all commands. Each is imported when it is used, so that `isthmus pub` starts fast."""

import importlib
from typing import Final

import click

_COMMANDS: Final = {
    # name: (module, attribute, one line of help)
    "demo": ("demo", "demo", "Watch two LANs talk while brokers are killed."),
    "drill": ("drill", "drill", "Break things on purpose and see whether every promise holds."),
    "sim": ("simulation", "sim", "Run overlays in virtual time while everything goes wrong."),
    "up": ("up", "up", "Run a whole topology on this machine and watch it."),
    "edge": ("edge", "edge", "Run an edge broker for a LAN."),
    "router": ("router", "router", "Run a routing broker."),
    "zookeeper": ("zookeeper", "zookeeper", "Run a ZooKeeper server, or an ensemble of three."),
    "pub": ("messages", "publish", "Publish messages from arguments or standard input."),
    "sub": ("messages", "subscribe", "Print messages of topics."),
    "status": ("status", "status", "Show leader, brokers, links and what is wrong."),
    "topics": ("topics", "topics", "List topics, who serves them and who uses them."),
    "token": ("token", "token", "Make, list and revoke tokens of clients."),
    "certs": ("certs", "certs", "Make certificates for encrypted links."),
    "doctor": ("doctor", "doctor", "Check whether this machine can run Isthmus."),
    "report": ("report", "report", "Report from traces where the latency went."),
    "watch": ("watch", "watch", "Watch latency and deadline misses from traces, live."),
    "trace": ("trace", "trace", "Ship traces to Parquet."),
    "topology": ("topology", "topology", "List, check, show and draw topologies; make a compose file."),
    "bench": ("bench", "bench", "Measure Isthmus on this machine."),
}


class _Commands(click.Group):
    """Knows its commands by name and imports only the one that is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, attribute, _ = _COMMANDS[cmd_name]
        command = getattr(importlib.import_module(f"isthmus.commands.{module}"), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in _COMMANDS.items()])


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="isthmus")
def cli() -> None:
    """Isthmus joins isolated LANs: publish/subscribe across the WAN that keeps deadlines."""


def main() -> None:
    """Run the command line."""
    cli(prog_name="isthmus")
