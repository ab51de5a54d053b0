"""`dshard simulate`: training steps and pipelines, simulated before they are launched."""

from __future__ import annotations

from dshard.tools.cli.arguments import Commands, add_group
from dshard.tools.cli.model_commands import add_simulate_step
from dshard.tools.cli.pipeline_commands import add_simulate_pipeline


def add_simulate(commands: Commands) -> None:
    """Add the command to those of the parser."""
    kinds = add_group(
        commands,
        "simulate",
        "what a training step or a pipeline would do, before it is launched",
        title="what to simulate",
    )
    add_simulate_step(kinds)
    add_simulate_pipeline(kinds)
