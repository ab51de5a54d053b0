"""The recorder of steps."""

from dshard.rehearsal.local_recorder import Slot, StepRecorder

__all__ = ["Slot", "StepRecorder"]
