"""torch's planners, with progress reports."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dshard.errors import CheckpointError
from dshard.torch_private import late


def read_value(name: str, stream: Any, current: Any) -> Any:
    """Read a value of torch.save that needs only globals that torch.load allows, or that `current` is pickled with."""
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


_set_element: Callable[..., None] = late("torch.distributed.checkpoint._traverse.set_element")

Report = Callable[[int, int], object]
"""Called with the bytes that this rank has written or read, and with their total."""


class SavePlanner(DefaultSavePlanner):
    """Planner of a save that reports progress for each tensor that this rank writes."""

    def __init__(self, report: Report | None) -> None:
        super().__init__()
        self.report, self.done, self.total = report, 0, 0

    def finish_plan(self, new_plan: Any) -> Any:
        """Note the bytes of this rank's plan."""
        self.total = sum(item.tensor_storage_size() or 0 for item in new_plan.items)
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: Any) -> Any:
        """The data of one item."""
        self.done += write_item.tensor_storage_size() or 0
        if self.report is not None:
            self.report(self.done, self.total)
        return super().resolve_data(write_item)


class LoadPlanner(DefaultLoadPlanner):
    """Planner of a load that reports progress for each region that this rank has read."""

    def __init__(self, current: Mapping[str, object], report: Report | None) -> None:
        super().__init__()
        self.current = current  # torch forgets values that are no tensors when it sets the planner up
        self.report, self.done, self.total = report, 0, 0

    def finish_plan(self, central_plan: Any) -> Any:
        """Note the bytes of this rank's plan."""
        self.total = sum(prod(item.lengths) * self._itemsize(item.dest_index.fqn) for item in central_plan.items)
        return super().finish_plan(central_plan)

    def _itemsize(self, name: str) -> int:
        assert self.metadata is not None
        match self.metadata.state_dict_metadata[name]:
            case TensorStorageMetadata(properties=properties):
                return properties.dtype.itemsize
            case _:
                return 0

    def load_bytes(self, read_item: Any, value: object) -> None:
        """Read a value that is no tensor, without executing anything that the user has not named."""
        name = read_item.dest_index.fqn
        loaded = read_value(name, value, self.current.get(name))
        _set_element(self.original_state_dict, self.mappings[name], loaded)

    def commit_tensor(self, read_item: Any, tensor: Tensor) -> None:
        """Report that this region has been read."""
        super().commit_tensor(read_item, tensor)
        self.done += tensor.nbytes
        if self.report is not None:
            self.report(self.done, self.total)
