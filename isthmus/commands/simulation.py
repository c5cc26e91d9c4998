"""`isthmus sim`: whole overlays in virtual time, from seeds."""

import json
from pathlib import Path

import click

from benchmarks import machine
from isthmus.errors import explain_errors
from simulation import Outcome, simulate
from simulation.ablations import Ablation
from simulation.summary import in_words, summarise


class SeedRange(click.ParamType[tuple[int | None, int]]):
    """How many seeds, or which: 500, or 1001..1500."""

    name = "N or A..B"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int | None, int]:
        """First and last seed; or None and how many."""
        first, dots, last = str(value).partition("..")
        try:
            numbers = (int(first), int(last)) if dots else (None, int(first))
        except ValueError:
            self.fail(f"{value!r} is neither a number nor two of them, as in 1001..1500", param, ctx)
        if numbers[1] < (numbers[0] or 1):
            self.fail(f"there is no seed in {value!r}", param, ctx)
        return numbers


@click.command()
@click.option("--seed", type=int, default=1, show_default=True, help="Decides everything that happens.")
@click.option(
    "--seeds",
    type=SeedRange(),
    default="1",
    show_default=True,
    help="Runs, from --seed on; or the seeds themselves, as in 1001..1500.",
)
@click.option(
    "--without",
    "ablation",
    type=click.Choice([str(item) for item in Ablation]),
    help="Do without a safeguard, to see whether it is missed.",
)
@click.option("--log", type=click.Path(path_type=Path, dir_okay=False), help="Write all that happened here.")
@click.option(
    "--json", "file", type=click.Path(path_type=Path, dir_okay=False), help="Write the result here."
)
@explain_errors
def sim(
    seed: int, seeds: tuple[int | None, int], ablation: str | None, log: Path | None, file: Path | None
) -> None:
    """Run overlays in virtual time while everything goes wrong.

    Exit status 0: every promise held; 1: one was broken; 2: a run could not be judged.
    """
    lacking = None if ablation is None else Ablation(ablation)
    first, last = seeds
    numbers = range(seed, seed + last) if first is None else range(first, last + 1)
    outcomes: list[Outcome] = []
    for number in numbers:
        history: list[str] | None = None if log is None else []
        outcome = simulate(number, lacking, history)
        outcomes.append(outcome)
        if log is not None and history is not None:
            log.write_text("\n".join(history) + "\n", encoding="utf-8")
        if len(numbers) == 1 or outcome.verdict != "held":
            _show(outcome, ablation)
        if len(numbers) > 1 and len(outcomes) % 100 == 0:
            click.echo(_summary(outcomes), err=True)
    if len(numbers) > 1:
        click.echo(_summary(outcomes))
    if file is not None:
        records = [outcome.to_record() for outcome in outcomes]
        result = records[0]
        if len(numbers) > 1:
            result = {"summary": summarise(records), "machine": machine.describe(), "runs": records}
        file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    verdicts = {outcome.verdict for outcome in outcomes}
    raise SystemExit(1 if "broken" in verdicts else 2 if "unknown" in verdicts else 0)


def _show(outcome: Outcome, ablation: str | None) -> None:
    click.echo(
        f"seed {outcome.seed}: {outcome.verdict}, {outcome.simulated_s:.0f} s in {outcome.wall_s:.2f} s, "
        f"{outcome.published} messages published, {outcome.delivered} delivered, "
        f"{outcome.judged} of {outcome.owed} judged for loss, trace {outcome.trace_hash}"
    )
    for fault in outcome.faults:
        click.echo(f"  {fault}")
    for violation in outcome.violations:
        click.echo(f"  BROKEN {violation}")
    if outcome.crash:
        click.echo(f"  cannot be judged: {outcome.crash}")
    if outcome.verdict != "held":
        option = f" --without {ablation}" if ablation else ""
        click.echo(f"  replay: isthmus sim --seed {outcome.seed}{option} --log history.txt")


def _summary(outcomes: list[Outcome]) -> str:
    return in_words(summarise([outcome.to_record() for outcome in outcomes]))
