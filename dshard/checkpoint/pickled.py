"""Values other than tensors, read without executing code that the user has not allowed."""

from __future__ import annotations

import io
import pickle
from types import SimpleNamespace
from typing import Any

import torch

from dshard.errors import CheckpointError


def read_value(name: str, stream: Any, current: Any) -> Any:
    """Read a value of torch.save that needs only globals that torch.load allows, or that `current` is pickled with.

    Raises:
        CheckpointError: it names something else.
    """
    try:
        return torch.load(stream, weights_only=True)
    except pickle.UnpicklingError:
        stream.seek(0)
    allowed, refused = _globals_of(current), set[str]()

    class Restricted(pickle.Unpickler):
        def find_class(self, module: str, attribute: str) -> Any:
            if (module, attribute) not in allowed:
                refused.add(f"{module}.{attribute}")
                raise pickle.UnpicklingError
            return super().find_class(module, attribute)

    try:
        return _load(stream, Restricted)
    except Exception as error:  # whatever unpickling may raise
        reason = f"it was pickled with {refused.pop()}" if refused else f"{type(error).__name__}: {error}"
    raise CheckpointError(
        f"{name!r} is not read, {reason}: to read a value of a class of its own, let the state that it is loaded into "
        "have such a value there, or name the class to torch.serialization.add_safe_globals"
    )


def _globals_of(value: object) -> set[tuple[str, str]]:
    """The globals, as (module, name), in the pickle of a value."""
    names: set[tuple[str, str]] = set()

    class Recording(pickle.Unpickler):
        def find_class(self, module: str, attribute: str) -> Any:
            names.add((module, attribute))
            return super().find_class(module, attribute)

    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    _load(stream, Recording)
    return names


def _load(stream: Any, unpickler: type[pickle.Unpickler]) -> Any:
    module = SimpleNamespace(__name__="pickle", Unpickler=unpickler, load=None)  # torch's form, without older ones
    return torch.load(stream, weights_only=False, pickle_module=module)
