"""Whether an input of a model is whole, alike on all ranks, or rows of a data rank: by its name, or by an example."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, Literal, TypeAlias

from torch import nn

from dshard.core.signature import Args, Kwargs
from dshard.errors import LayoutError
from dshard.parallel.nested_tensors import named_tensors
from dshard.validate import check_one_of, check_type

Mode: TypeAlias = Literal["global", "per-data-rank"]
MODES: tuple[Mode, ...] = ("global", "per-data-rank")
Path: TypeAlias = tuple[str, ...]
"""The names and numbers that lead to an input: those of an argument, and of what contains it there."""
REST = "*"


def argument_names(model: nn.Module, n_args: int) -> list[str]:
    """The names of the parameters of `forward`, and of `n_args` arguments if it takes more by position."""
    names = [p.name for p in signature(model.forward).parameters.values() if p.kind is not p.KEYWORD_ONLY]
    return names + [f"argument {i}" for i in range(len(names), n_args)]


def argument_path(path: Path, names: Sequence[str]) -> Path:
    """The path of a tensor in `(args, kwargs)` as one that begins with the name of its argument."""
    kind, argument, *rest = path
    return (names[int(argument)] if kind == "0" else argument, *rest)


@dataclass(frozen=True, slots=True)
class InputModes:
    """The modes of inputs by their names, of the rest, and the inputs that are no rows of an example batch.

    A name is that of an argument, or of a key within one, or several of these joined by dots; it stands for all within.
    """

    named: Mapping[Path, Mode]
    rest: Mode
    whole_in_example: frozenset[Path] = frozenset()

    @property
    def per_data_rank(self) -> bool:
        """Whether any input is the rows of a data rank."""
        return "per-data-rank" in (self.rest, *self.named.values())

    def of(self, path: Path) -> Mode | None:
        """The mode of an input; None if its size decides whether it is rows. A longer name goes first."""
        names = [name for name in self.named if _contains(path, name)]
        if names:
            return self.named[max(names, key=len)]
        return "global" if self.rest == "global" or path in self.whole_in_example else None


def _contains(path: Path, name: Path) -> bool:
    return any(path[i : i + len(name)] == name for i in range(len(path)))


def input_modes(inputs: object, model: nn.Module, args: Args, kwargs: Kwargs) -> InputModes:
    """Check the argument `inputs` of `parallelize`, beside the example batch."""
    if not isinstance(inputs, Mapping):
        check_one_of(inputs, MODES, "inputs", LayoutError)
        inputs = {REST: inputs}
    for name, mode in inputs.items():
        check_type(name, str, "a name in inputs", "give the names of arguments, or '*' for the rest", LayoutError)
        check_one_of(mode, MODES, f"inputs[{name!r}]", LayoutError)
    named: Any = {tuple(name.split(".")): mode for name, mode in inputs.items() if name != REST}
    modes = InputModes(named, inputs.get(REST, "per-data-rank"))  # type: ignore[arg-type]
    arguments = argument_names(model, len(args))
    example = [(argument_path(path, arguments), x) for path, x in named_tensors((args, kwargs))]
    rows = next((x.shape[0] for path, x in example if x.dim() and modes.of(path) != "global"), None)
    return replace(modes, whole_in_example=frozenset(path for path, x in example if x.dim() and x.shape[0] != rows))
