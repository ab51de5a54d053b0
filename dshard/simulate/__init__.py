"""What a training step costs before anything is launched: time, bytes and memory, on 8 devices or on thousands."""

from dshard.simulate.arrange import bunched
from dshard.simulate.forms import FORMS, Form, form_of
from dshard.simulate.memory import Memory
from dshard.simulate.model import Model
from dshard.simulate.recording import Recorded, record
from dshard.simulate.search import Found, search
from dshard.simulate.setup import Setup
from dshard.simulate.step import Step, simulate_step, timeline
from dshard.simulate.timeline import Event, Slot

__all__ = [
    "FORMS",
    "Event",
    "Form",
    "Found",
    "Memory",
    "Model",
    "Recorded",
    "Setup",
    "Slot",
    "Step",
    "bunched",
    "form_of",
    "record",
    "search",
    "simulate_step",
    "timeline",
]
