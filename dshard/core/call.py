"""One call of an operator as its rule sees it, and a row of a family's table of operators.

Design: docs/design/0013-one-row-per-operator.md
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dshard.core.signature import Args, Function, Kwargs
from dshard.core.spec import Spec
from dshard.cost import PlannedCollective
from dshard.layout import Layout, Shape
from dshard.mesh import Coordinate
from dshard.placements import ReduceOp
from dshard.redistribute import Plan
from dshard.rules.rule import PassThrough, Rule
from dshard.rules.rule_notation import parse_rule
from dshard.rules.strategy import Strategy
from dshard.torch_private import OpOverload

LocalOp: TypeAlias = Function
Check: TypeAlias = Callable[[dict[str, Any]], None]
"""Takes the arguments by name, and raises the errors that torch's kernels raise for them."""
Kernel: TypeAlias = Callable[["RankCall"], LocalOp]


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """An operator with its arguments, in which a `Spec` stands for each distributed tensor.

    `specs` are those of the tensor operands in order, `outs` the outputs of single-device torch, as meta tensors.
    """

    func: OpOverload
    args: Args
    kwargs: Kwargs
    specs: tuple[Spec, ...]
    outs: tuple[Tensor, ...]

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The global shapes of the tensor operands."""
        return tuple(spec.shape for spec in self.specs)

    @property
    def out_shapes(self) -> tuple[Shape, ...]:
        """The global shapes of the outputs."""
        return tuple(tuple(out.shape) for out in self.outs)

    @property
    def out_sizes(self) -> tuple[tuple[Shape, int], ...]:
        """The global shape of each output, and the bytes of an element."""
        return tuple((tuple(out.shape), out.itemsize) for out in self.outs)

    def argument(self, name: str) -> Any:
        """The argument called `name` in the operator's schema, given by position or by name; None if there is none."""
        for i, argument in enumerate(self.func._schema.arguments):
            if argument.name == name:
                if i < len(self.args):
                    return self.args[i]
                return self.kwargs.get(name, argument.default_value if argument.has_default_value() else None)
        return None

    def with_argument(self, name: str, value: object) -> LocalOp:
        """The operator with `value` in place of its argument `name`, which it has."""
        at = [argument.name for argument in self.func._schema.arguments].index(name)

        def run(*args: object, **kwargs: object) -> Any:
            if at < len(args):
                return self.func(*args[:at], value, *args[at + 1 :], **kwargs)
            return self.func(*args, **{**kwargs, name: value})

        return run

    def rule(
        self,
        text: str,
        *,
        at: str | Sequence[int] | None = None,
        same_size: bool = False,
        reduce: ReduceOp | Sequence[ReduceOp] = "sum",
        passes: tuple[PassThrough, ...] = (),
    ) -> Rule:
        """The rule that `text` says for the tensors of this call: see `dshard.rules.rule_notation.parse_rule`.

        `at` are the dims between two `...`, or the name of the argument that says them.
        """
        if isinstance(at, str):
            dims = self.argument(at)
            at = (dims,) if isinstance(dims, int) else tuple(dims or ())
        return parse_rule(text, self.shapes, self.out_shapes, at=at, same_size=same_size, reduce=reduce, passes=passes)

    def dim(self, name: str = "dim", ndim: int | None = None) -> int:
        """The argument `name` as a tensor dim counted from 0."""
        ndim = len(self.specs[0].shape) if ndim is None else ndim
        dim: int = self.argument(name)
        return dim + ndim if dim < 0 else dim

    def dims(self) -> tuple[int, ...]:
        """The argument `dim` as tensor dims counted from 0: none or an empty list means all."""
        ndim = len(self.specs[0].shape)
        value = self.argument("dim")
        if value is None or value == []:
            return tuple(range(ndim))
        value = [value] if isinstance(value, int) else value
        return tuple(dim + ndim if dim < 0 else dim for dim in value)

    def at(self, strategy: Strategy, coordinate: Coordinate) -> RankCall:
        """The call as the rank at a coordinate runs it by a strategy."""
        return RankCall(self.func, self.args, self.kwargs, self.specs, self.outs, strategy, coordinate)


@dataclass(frozen=True, slots=True, eq=False)
class RankCall(Call):
    """A call as one rank runs it: by a strategy, on the local tensors at its coordinate."""

    strategy: Strategy
    coordinate: Coordinate

    def held(self, dim: int, operand: int = 0) -> range:
        """The indices of a dim of an operand that the rank holds."""
        return self.strategy.inputs[operand].dim_range(dim, self.shapes[operand][dim], self.coordinate)

    def local_shape(self, operand: int = 0) -> Shape:
        """The shape of the rank's local tensor of an operand."""
        return self.strategy.inputs[operand].local_shape(self.shapes[operand], self.coordinate)

    def out_local_shape(self, i: int = 0) -> Shape:
        """The shape of the rank's local tensor of output `i`."""
        return self.strategy.outputs[i].local_shape(self.out_shapes[i], self.coordinate)

    def is_first(self, *factors: str) -> bool:
        """Whether the rank is the first along each mesh axis that shards one of these factors."""
        return all(row not in factors or self.coordinate[axis] == 0 for axis, row in enumerate(self.strategy.rows))


@dataclass(frozen=True, slots=True, eq=False)
class AlternativePlan:
    """The plan of an alternative for one call: layouts of operands and outputs, and the collectives between them.

    `run` takes the arguments of the call, with each tensor in its layout of `inputs`. It redistributes as `plans` say,
    each with the bytes of an element, and sends `exchanges`. Both are priced, and shown as what will run.
    """

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    run: LocalOp
    plans: tuple[tuple[Plan, int], ...] = ()
    exchanges: tuple[PlannedCollective, ...] = ()


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another way to run an operator than by its rule: a candidate beside the rule's, taken where it is cheaper.

    `plan` gives how it runs a call with this rule: in one way, in one of several layouts, or None where it cannot.
    `rule` gives, whatever the layouts, the rule by which the alternative runs a call with the rule given; None where
    no rule says it. Factors that it alone shards are reduced within the call: outputs without them are replicated.
    """

    name: str
    plan: Callable[[Call, Rule], AlternativePlan | Sequence[AlternativePlan] | None]
    rule: Callable[[Rule], Rule | None] = lambda rule: None


@dataclass(frozen=True, slots=True, eq=False)
class OperatorForm:
    """A call of a function of torch as one operator, as whoever plans a whole step sees it.

    `operands` are all tensors among the arguments, in the order of the rule; `alternatives` are other ways to run the
    call, each with its name and its rule. `kernel` gives what a rank runs by a
    strategy of `rule` on its local operands, if not the function.
    """

    operands: tuple[Tensor, ...]
    rule: Rule
    alternatives: tuple[tuple[str, Rule], ...] = ()
    kernel: Callable[[Strategy, Coordinate], LocalOp] | None = None


@dataclass(frozen=True, slots=True)
class Composed:
    """Calls that run as other operators, each with its own rule, if `applies` is true of their arguments.

    `run` and `is_requested` take operator, arguments by position and by name. `is_requested` says whether the user's
    call is for a number over all elements, so that communication is expected. With `local` its own work is local.
    """

    run: Callable[[OpOverload, Args, Kwargs], Any]
    applies: Callable[[tuple[Any, ...]], bool] = lambda args: True
    is_requested: Callable[[OpOverload, Args, Kwargs], bool] = lambda func, args, kwargs: False
    local: bool = False


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator's row in a table, which names all that is particular to it.

    `rule`: its factors. `kernel`: the function on local tensors, if not the operator itself. `alternatives`: other ways
    to run it, candidates beside the rule's. `composed`: by overload, the calls that no rule describes. `check`: refuses
    arguments that torch's kernels refuse and its meta functions do not; `refuses_empty`: the kernel itself refuses some
    calls whose first operand has no elements. Values of scalar arguments are part of the cache key unless `values` is
    False: then the rule does not depend on them. `blocks`: the kernel depends on sizes alone, not on which indices a
    rank has, so operands may be sharded in blocks, as they may without a kernel.
    """

    rule: Callable[[Call], Rule]
    kernel: Kernel | None = None
    alternatives: tuple[Alternative, ...] = ()
    composed: Mapping[OpOverload, Composed] = field(default_factory=dict)
    check: Check | None = None
    refuses_empty: bool = False
    values: bool = True
    blocks: bool = False


def arguments_by_name(func: OpOverload, args: Args, kwargs: Kwargs) -> Kwargs:
    """The arguments that a call gives, by their names in the operator's schema."""
    return dict(zip([argument.name for argument in func._schema.arguments], args, strict=False)) | kwargs


def overloads(name: str) -> list[OpOverload]:
    """The overloads of torch's operator `name`, but for those with `out=`."""
    packet = getattr(torch.ops.aten, name)
    return [getattr(packet, overload) for overload in packet.overloads() if "out" not in overload]


def writes_first(func: OpOverload) -> bool:
    """Whether the operator writes to its first operand, a tensor or a list of them."""
    arguments = func._schema.arguments
    return bool(arguments) and arguments[0].alias_info is not None and arguments[0].alias_info.is_write


def views_first(func: OpOverload) -> bool:
    """Whether the output is a view of the first operand."""
    arguments = func._schema.arguments
    return bool(arguments) and arguments[0].alias_info is not None and not arguments[0].alias_info.is_write
