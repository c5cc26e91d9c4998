"""`isthmus sim`: whole overlays in virtual time, from seeds."""

import json
from pathlib import Path

import click

from isthmus.errors import explain_errors
from simulation import Outcome, simulate
from simulation.ablations import Ablation


@click.command()
@click.option("--seed", type=int, default=1, show_default=True, help="Decides everything that happens.")
@click.option("--seeds", type=click.IntRange(1), default=1, show_default=True, help="Runs, from --seed on.")
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
def sim(seed: int, seeds: int, ablation: str | None, log: Path | None, file: Path | None) -> None:
    """Run overlays in virtual time while everything goes wrong; fails if a promise is broken."""
    lacking = None if ablation is None else Ablation(ablation)
    outcomes: list[Outcome] = []
    for number in range(seed, seed + seeds):
        history: list[str] | None = None if log is None else []
        outcome = simulate(number, lacking, history)
        outcomes.append(outcome)
        if log is not None and history is not None:
            log.write_text("\n".join(history) + "\n", encoding="utf-8")
        if seeds == 1 or outcome.verdict != "held":
            _show(outcome, ablation)
        if seeds > 1 and len(outcomes) % 100 == 0:
            click.echo(_summary(outcomes), err=True)
    if seeds > 1:
        click.echo(_summary(outcomes))
    if file is not None:
        records = [outcome.to_record() for outcome in outcomes]
        result = records[0] if seeds == 1 else {"runs": records}
        file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if any(outcome.verdict != "held" for outcome in outcomes):
        raise SystemExit(1)


def _show(outcome: Outcome, ablation: str | None) -> None:
    click.echo(
        f"seed {outcome.seed}: {outcome.verdict}, {outcome.simulated_s:.0f} s in {outcome.wall_s:.2f} s, "
        f"{outcome.published} messages published, {outcome.delivered} delivered, trace {outcome.trace_hash}"
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
    simulated_s = sum(outcome.simulated_s for outcome in outcomes)
    wall_s = sum(outcome.wall_s for outcome in outcomes)
    broken = [str(outcome.seed) for outcome in outcomes if outcome.verdict != "held"]
    delivered = sum(outcome.delivered for outcome in outcomes)
    faults = sum(len(outcome.faults) for outcome in outcomes)
    return (
        f"{len(outcomes)} seeds, {simulated_s:.0f} simulated s in {wall_s:.0f} s "
        f"({simulated_s / wall_s:.0f} times as fast), {faults} faults, {delivered} messages delivered, "
        f"not held: {', '.join(broken) or 'none'}"
    )
