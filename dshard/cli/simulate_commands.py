"""`dshard simulate`: training steps and pipelines, simulated before they are launched."""

from __future__ import annotations

from dshard.cli.arguments import Commands, sentence
from dshard.cli.model_commands import add_simulate_step
from dshard.cli.pipeline_commands import add_simulate_pipeline


def add_simulate(commands: Commands) -> None:
    """Add the command to those of the parser."""
    summary = "what a training step or a pipeline would do, before it is launched"
    kinds = commands.add_parser("simulate", help=summary, description=sentence(summary)).add_subparsers(
        title="what to simulate", metavar="kind", required=True
    )
    add_simulate_step(kinds)
    add_simulate_pipeline(kinds)
