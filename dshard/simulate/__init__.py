"""Simulation of a training step without launching it: time, bytes and memory, on any number of devices."""

from dshard.simulate.memory import Memory
from dshard.simulate.recording import Recorded, record
from dshard.simulate.setup import Setup, host_tiles
from dshard.simulate.tensor_forms import FORMS, Form, form_of
from dshard.simulate.training_step import Step, simulate_step, timeline
from dshard.simulate.transformer import Model
from dshard.step_timeline import Event, PlacedEvent

__all__ = [
    "FORMS",
    "Event",
    "Form",
    "Memory",
    "Model",
    "PlacedEvent",
    "Recorded",
    "Setup",
    "Step",
    "form_of",
    "host_tiles",
    "record",
    "simulate_step",
    "timeline",
]
