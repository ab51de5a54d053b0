"""The inputs of a parallelized module: global batches, equal on all ranks, or the rows of each data rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias
from zlib import crc32

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from dshard.comm import checksum, comparing, gather_rows, has_data, simulated_ranks, warn_user
from dshard.core.comparisons import ALIKE, EVERY, comparisons_on, is_quiet
from dshard.core.local_checks import refuse_other_forms
from dshard.core.signature import Args, Kwargs
from dshard.core.transforms import has_tangent, is_differentiating_forward, unfollowed, unwrapped
from dshard.core.trees import GivenCopy, map_given, named_tensors, nested_tensors
from dshard.core.wrapper import DISTRIBUTED, is_recorded
from dshard.errors import CompileError, LayoutError
from dshard.parallel.batch_rows import Rows, argument_path, argument_tensors
from dshard.parallel.plan_values import ModelPlan
from dshard.parallel.same_program import Draws, RowsOfRanks, differing, ranks_alike, ranks_by_value, states
from dshard.placements import Replicate
from dshard.tensor import DTensor
from dshard.torch_private import is_functorch_wrapped, is_transforming
from dshard.validate import check_one_of, check_type

Mode: TypeAlias = Literal["global", "per-data-rank"]
MODES: tuple[Mode, ...] = ("global", "per-data-rank")
Path: TypeAlias = tuple[str, ...]
"""The names and numbers that lead to an input: those of an argument, and of what contains it there."""
REST = "*"


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
        names = [name for name in self.named if any(path[i : i + len(name)] == name for i in range(len(path)))]
        if names:
            return self.named[max(names, key=len)]
        return "global" if self.rest == "global" or path in self.whole_in_example else None


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
    example = argument_tensors(model, args, kwargs)
    rows = next((x.shape[0] for path, x in example if x.dim() and modes.of(path) != "global"), None)
    return replace(modes, whole_in_example=frozenset(path for path, x in example if x.dim() and x.shape[0] != rows))


MAX_TENSORS = 30
"""The most plain tensors in one call: so many numbers of each rank are exchanged."""
STATES = 2 + 2 * MAX_TENSORS
"""The column from which on a row has the states of generators."""


class Input(NamedTuple):
    """A plain input: its path, a name for messages, and its mode, None if its size decides whether it is rows."""

    x: Tensor
    path: Path
    name: str
    mode: Mode | None


class Inputs:
    """Lays out plain inputs of a model by its plan: global batches, or as `modes` say the rows of each data rank.

    The ranks compare their inputs at the first call, then at one of 50, and at all calls in debug mode. `rows` are
    those of the last call, None for global batches; `draws` looks at generators that differed between ranks. If the
    model `returns_plain` rows, their gradients arrive here weighted.
    """

    def __init__(self, plan: ModelPlan, modes: InputModes, draws: Draws, returns_plain: bool = False) -> None:
        self.plan, self.modes, self.draws, self.returns_plain = plan, modes, draws, returns_plain
        self.per_data_rank = modes.per_data_rank
        self.compared, self.comparisons = False, comparisons_on(plan.mesh)
        self.calls = 0
        self.rows: Rows | None = None

    def __call__(
        self,
        inputs: object,
        names: Callable[[], Sequence[str]] | None = None,
        copies: list[GivenCopy] | None = None,
    ) -> Any:
        """Lay out the plain tensors of nested `inputs` where needed.

        `names` returns the names of a module's positional arguments, if `inputs` are its args and kwargs. The copies of
        their containers are added to `copies`.
        """
        copies = [] if copies is None else copies
        if is_transforming():
            inputs = map_given(inputs, unfollowed, copies)
        plain = [x for x in nested_tensors(inputs) if _is_plain(x)]
        if not plain:
            return inputs
        if self.per_data_rank and is_dynamo_compiling():
            raise CompileError(
                "the rows of each data rank within a compiled region: ranks cannot ask each other how many there are "
                "there; lay the batch out before, model(distribute_batch(model, x)), or compile the blocks of the model"
            )
        self.calls += 1
        is_turn = not self.compared or comparing()
        is_turn = is_turn or (self.per_data_rank and self.calls % EVERY == 0 and not is_quiet())
        compares = is_turn and have_values(plain)
        if self.per_data_rank or (compares and not self.compared):
            rows, of_rows = self._exchange(inputs, names, compares)
            self.compared |= compares
            if self.per_data_rank:
                self.rows = rows
                return map_given(inputs, lambda x: self._laid_out(x, id(x) in of_rows) if _is_plain(x) else x, copies)
        elif self.comparisons.are_due and not comparing() and have_values(plain):
            for each in self.named(inputs, names):
                self.comparisons.put_down(each.x, each.path, partial("the input {}".format, each.name))
        if is_recorded(plain) or is_differentiating_forward():
            return map_given(inputs, self._differentiable, copies)
        return inputs

    def _laid_out(self, x: Tensor, is_rows: bool) -> DTensor:
        if is_rows and self.rows is not None:
            return self.rows.join(self.rows.unweighted(x) if self.returns_plain else x)
        return _replicated(x, self.plan)

    def _differentiable(self, x: Any) -> Any:
        """An input that needs a gradient as a DTensor that passes it on; others are laid out later, by the plan."""
        return _replicated(x, self.plan) if _is_plain(x) and (x.requires_grad or has_tangent(x)) else x

    def _exchange(
        self, inputs: object, names: Callable[[], Sequence[str]] | None, compares: bool
    ) -> tuple[Rows, set[int]]:
        """Gather each rank's number of rows, and the ids of tensors that have the rows as first dim on all ranks."""
        named = self.named(inputs, names)
        for each in named:
            refuse_other_forms(each.x, f"the input {each.name}")
        own = row_of(named, compares)
        named.sort(key=lambda each: each.path)
        of_rank = gather_rows(own, self.plan.mesh, is_check=not self.per_data_rank)
        if len({row[0] for row in of_rank.values()}) > 1:
            lengths = ", as rows padded to other lengths, which padding='max_length' pads alike" * self.per_data_rank
            what = f"other tensors, or tensors of other dtypes or sizes{lengths}"
            raise LayoutError(self.differ(what, of_rank, [0]))
        if compares:
            self.draws.before = {}
            self.draws.differ = differing(of_rank, STATES, self.plan, self.per_data_rank)
        are_rows = [self._is_rows(each, i, of_rank) for i, each in enumerate(named)]
        for i, (each, is_rows) in enumerate(zip(named, are_rows, strict=True)):
            columns = [2 + i, 2 + MAX_TENSORS + i]
            for group in ranks_alike(of_rank, self.plan, is_rows and self.per_data_rank):
                if len({tuple(row[c] for c in columns) for row in group.values()}) > 1:
                    raise LayoutError(self.differ(each.name, group, columns))
        if compares and self.per_data_rank:
            self._warn_of_whole(named, are_rows, of_rank)
        counts = {at: row[1] for at, row in of_rank.items()}
        return Rows(self.plan, counts), {id(each.x) for each, is_rows in zip(named, are_rows, strict=True) if is_rows}

    def named(self, inputs: object, names: Callable[[], Sequence[str]] | None) -> list[Input]:
        """The plain inputs, each with its name and mode."""
        tensors = [(path, x) for path, x in named_tensors(inputs) if _is_plain(x)]
        if len(tensors) > MAX_TENSORS:
            raise LayoutError(
                f"{len(tensors)} plain tensors in one call: lay some out before; {MAX_TENSORS} are compared"
            )
        arguments = None if names is None else names()
        if arguments is not None:
            tensors = [(argument_path(path, arguments), x) for path, x in tensors]
        kind = "" if arguments is not None else "entry "
        return [Input(x, path, kind + ".".join(path), self.modes.of(path)) for path, x in tensors]

    def _is_rows(self, each: Input, i: int, of_rank: RowsOfRanks) -> bool:
        """Whether the `i`th input is rows: on all ranks it has as many entries as there are rows."""
        has_rows = each.x.dim() > 0 and all(row[2 + i] == row[1] for row in of_rank.values())
        if each.mode == "per-data-rank" and not has_rows:
            raise LayoutError(
                f"the input {each.name} of shape {tuple(each.x.shape)} is named 'per-data-rank', but has not as many "
                f"entries as there are rows: give it so many, or write inputs={{{each.name!r}: 'global'}}"
            )
        return has_rows and each.mode != "global"

    def _warn_of_whole(self, named: Sequence[Input], are_rows: Sequence[bool], of_rank: RowsOfRanks) -> None:
        """Warn of inputs that count as rows by their size alone, though all data ranks have the same ones."""
        alike = [len({row[2 + MAX_TENSORS + i] for row in of_rank.values()}) == 1 for i in range(len(named))]
        if all(is_alike for is_alike, is_rows in zip(alike, are_rows, strict=True) if is_rows):
            return  # the rows of all data ranks are the same
        for each, is_alike, is_rows in zip(named, alike, are_rows, strict=True):
            if is_alike and is_rows and each.mode is None and not _is_constant(each.x):
                warn_user(
                    f"the input {each.name} is alike on all ranks, and counts as rows of each, for it has as many "
                    f"entries: if it is whole, parallelize(..., inputs={{{each.name!r}: 'global'}}) says so, else "
                    f"{{{each.name!r}: 'per-data-rank'}}",
                    self.plan.mesh,
                )

    def differ(self, what: str, of_rank: RowsOfRanks, columns: Sequence[int]) -> str:
        """The message of an error, if ranks that must be given alike differ in these columns."""
        if self.per_data_rank:
            way_out = (
                "with inputs='per-data-rank' all ranks of a data rank give the same rows, and all ranks the same rest: "
                "load by dshard.data_ranks(model), and seed alike"
            )
        else:
            way_out = ALIKE
        ranks = ranks_by_value(of_rank, columns, self.plan.mesh)
        return f"a parallelized module is given different data, {what}, on {ranks}: {way_out}"


def _is_constant(x: Tensor) -> bool:
    """Whether all entries along the first dim are alike, such as the masks of rows that are not padded."""
    return x.shape[0] < 2 or bool((x == x[:1]).all())


def _is_plain(x: object) -> bool:
    """Whether `x` is a plain tensor: no distributed one, nor what a transform of torch.func wraps around one."""
    if not isinstance(x, Tensor) or isinstance(x, DISTRIBUTED):
        return False
    return not (is_functorch_wrapped(x) and isinstance(unwrapped(x), DISTRIBUTED))


def have_values(plain: Sequence[Tensor]) -> bool:
    """Whether the values of these tensors can be read, and belong to one rank, not to simulated ranks."""
    return simulated_ranks() is None and not is_transforming() and all(map(has_data, plain))


def _replicated(x: Tensor, plan: ModelPlan) -> DTensor:
    return DTensor.from_local(x, plan.mesh, (Replicate(),) * plan.mesh.ndim, shape=x.shape)


def row_of(named: Sequence[Input], compares: bool) -> list[int]:
    """The numbers that ranks compare: kinds and sizes, rows, first dims, checksums of values, states of generators."""
    count = next((x.shape[0] for each in named if (x := each.x).dim() and each.mode != "global"), 0)
    plain = [each.x for each in sorted(named, key=lambda each: each.path)]  # a dict may have another order on each rank
    kinds = crc32(str([(tuple(x.shape[1:]), x.dim(), x.dtype) for x in plain]).encode())
    empty = [0] * (MAX_TENSORS - len(plain))
    sizes = [x.shape[0] if x.dim() else -1 for x in plain]
    values = [checksum(x) - 2**63 if type(x) is Tensor else 0 for x in plain] if compares else [0] * len(plain)
    return [kinds, count, *sizes, *empty, *values, *empty, *(states() if compares else ())]
