"""torch's experimental helpers by their names: functions on local tensors, and shardings of operators as rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dshard.comm import DeviceMesh, as_mesh, warn_user
from dshard.core.call import Call, Operator
from dshard.core.local_checks import gathered_shape
from dshard.core.plain_tensors import refusing_plain
from dshard.core.signature import Args, Function, Kwargs
from dshard.core.spec import Spec
from dshard.core.trees import leaves
from dshard.dispatch.registry import register
from dshard.errors import ArgumentError, LayoutError, ShapeError
from dshard.layout import Layout, Shape, format_of, layout_of, placements_on, replicated
from dshard.mesh import Mesh
from dshard.placements import Partial, Placement, ReduceOp, Replicate, Shard
from dshard.rules.rule import PassThrough, Rule, Term
from dshard.tensor import DTensor
from dshard.torch_private import OpOverload, OpOverloadPacket, pytree
from dshard.validate import as_tuple, check_callable, check_type, shown

Placements: TypeAlias = Sequence[Placement] | None
Row: TypeAlias = tuple[Sequence[Placement | None], Sequence[Placement | None]]

__all__ = ["TensorLike", "local_map", "register_sharding"]


def local_map(
    func: Function | None = None,
    out_placements: Placements | tuple[Placements, ...] = None,
    in_placements: tuple[Placements, ...] | None = None,
    in_grad_placements: tuple[Placements, ...] | None = None,
    device_mesh: DeviceMesh | Mesh | None = None,
    *,
    redistribute_inputs: bool = False,
) -> Function:
    """`func`, written for plain tensors, as a function of DTensors: it gets and returns local tensors.

    `out_placements` are the placements of the outputs, in the order of the flattened result: a sequence of placements
    for one tensor, a tuple of such sequences for several, None for a value that is no tensor. A tensor with None counts
    as replicated, as in `from_local`; `DSHARD_DEBUG=1` compares it between ranks. `in_placements` are the required
    placements of each argument, None for any; with `redistribute_inputs` arguments are redistributed to them. Without a
    DTensor among the arguments, `func` is called directly. Without `func` this is a decorator.

    Gradients are those of one device where `func` sends nothing: on a mesh axis on which some output is not replicated,
    each rank's gradient of a replicated argument is a term of a sum, and the ranks add them. `in_grad_placements`,
    those of the gradients of the local arguments, say otherwise: then, as in torch, None is an argument's own. Outputs
    of even arguments count as even, too; with uneven ones the ranks exchange the sizes of sharded outputs.

    Raises:
        LayoutError: an argument has other placements than it must have, or placements do not fit.
        ShapeError: not one entry for each argument or output.
        ArgumentError: no function, or entries that are no tuple.
    """
    if func is not None:
        check_callable(func, "local_map", "give a function of plain tensors")
    for name, entries in (("in_placements", in_placements), ("in_grad_placements", in_grad_placements)):
        if entries is not None:
            _check_entries(name, entries)
    if device_mesh is not None:
        as_mesh(device_mesh)
    if func is None:
        return partial(
            local_map,
            out_placements=out_placements,
            in_placements=in_placements,
            in_grad_placements=in_grad_placements,
            device_mesh=device_mesh,
            redistribute_inputs=redistribute_inputs,
        )

    placements = _LocalPlacements(
        _output_entries(out_placements), in_placements, in_grad_placements, device_mesh, redistribute_inputs
    )

    @wraps(func)
    def run(*args: object, **kwargs: object) -> Any:
        return placements.run(func, args, kwargs)

    return run


@dataclass(frozen=True, slots=True)
class _LocalPlacements:
    """The placements with which `local_map` runs a function of plain tensors on DTensors."""

    outputs: tuple[Placements, ...]
    inputs: tuple[Placements, ...] | None
    gradients: tuple[Placements, ...] | None
    mesh: DeviceMesh | Mesh | None
    redistribute_inputs: bool

    def run(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        """Call `func` on local tensors, and wrap its outputs; directly without a DTensor among the arguments."""
        flat, tree = pytree.tree_flatten(args)
        meshes = [arg.device_mesh for arg in flat if isinstance(arg, DTensor)]
        if not meshes:
            return func(*args, **kwargs)
        mesh = as_mesh(meshes[0] if self.mesh is None else self.mesh)
        varying = _varying(self.outputs) if self.gradients is None else frozenset()
        _check_count("in_placements", self.inputs, len(flat), "arguments")
        entries = zip(flat, self.inputs or (None,) * len(flat), strict=True)
        redistributed = [_in_placements(arg, i, at, self.redistribute_inputs) for i, (arg, at) in enumerate(entries)]
        local = _local_arguments(redistributed, self.gradients, varying, mesh)
        with refusing_plain(in_forward=True):
            out, out_tree = pytree.tree_flatten(func(*pytree.tree_unflatten(local, tree), **kwargs))
        _check_count("out_placements", self.outputs, len(out), "outputs")
        uneven = any(_is_uneven(arg._spec) for arg in redistributed if isinstance(arg, DTensor))
        wrapped = [
            _wrap_output(x, i, entry, mesh, uneven, varying)
            for i, (x, entry) in enumerate(zip(out, self.outputs, strict=True))
        ]
        return pytree.tree_unflatten(wrapped, out_tree)


def _output_entries(out_placements: Placements | tuple[Placements, ...]) -> tuple[Any, ...]:
    """The placements of each output, from those of one output or a tuple of those of several."""
    several = isinstance(out_placements, tuple) and not any(isinstance(p, _PLACEMENTS) for p in out_placements)
    return (*(out_placements or ()),) if several else (out_placements,)


_PLACEMENTS = (Shard, Replicate, Partial)


def _varying(out_entries: tuple[Placements, ...]) -> frozenset[int]:
    """The mesh axes on which some output is not replicated."""
    return frozenset(
        axis
        for entry in out_entries
        if isinstance(entry, Sequence)
        for axis, placement in enumerate(entry)
        if isinstance(placement, Shard | Partial)
    )


def _local_arguments(
    flat: Sequence[object], in_grad_placements: tuple[Placements, ...] | None, varying: frozenset[int], mesh: Mesh
) -> list[Any]:
    """The arguments with local tensors in place of DTensors."""
    _check_count("in_grad_placements", in_grad_placements, len(flat), "arguments")
    grads: Sequence[Placements] = in_grad_placements or [
        _partial_on(varying, arg.layout) if isinstance(arg, DTensor) and arg.layout.mesh == mesh else None
        for arg in flat
    ]
    return [
        arg.to_local(grad_placements=grad) if isinstance(arg, DTensor) else arg
        for arg, grad in zip(flat, grads, strict=True)
    ]


def _partial_on(varying: frozenset[int], layout: Layout) -> list[Placement] | None:
    """The placements of a gradient of which each rank has a term on `varying` axes; None: the tensor's own."""
    axes = {i for i, p in enumerate(layout.placements) if i in varying and p == Replicate()}
    placements = layout.cotangent().placements
    return [Partial() if i in axes else p for i, p in enumerate(placements)] if axes else None


def _check_entries(name: str, entries: object) -> None:
    """Refuse entries that are no tuple of placements, one entry for each argument."""
    checked = as_tuple(entries, name, "give a tuple with the placements of each argument, None for what is no tensor")
    alone = [entry for entry in checked if isinstance(entry, _PLACEMENTS)]
    if alone:
        raise LayoutError(
            f"local_map: {name} has the entry {alone[0]}: give a sequence of placements for each argument, one for "
            f"each mesh axis, as in ([{alone[0]!r}],)"
        )


def _check_count(name: str, entries: Sequence[object] | None, n: int, what: str) -> None:
    if entries is not None and len(entries) != n:
        raise ShapeError(
            f"local_map: {name} has {len(entries)} entries for {n} {what}: give one for each, None for no tensor"
        )


def _in_placements(arg: object, i: int, placements: Placements, move: bool) -> object:
    """Check, or redistribute, an argument to its required placements."""
    if placements is None or not isinstance(arg, Tensor):
        if placements is not None:
            raise LayoutError(f"local_map: argument {i} is no tensor, but in_placements lays it out: give None for it")
        return arg
    if not isinstance(arg, DTensor) or arg.layout == layout_of(arg.layout.mesh, placements, arg.ndim):
        return arg
    if not move:
        raise LayoutError(
            f"local_map: argument {i} has the layout [{arg.layout}], and in_placements say [{format_of(placements)}]: "
            "redistribute it, or set redistribute_inputs=True"
        )
    return arg.redistribute(placements=placements)


def _is_uneven(spec: Spec) -> bool:
    """Whether the local tensors have different shapes."""
    layout = spec.layout
    return any(
        spec.shape[dim] % prod(layout.mesh.shape[axis] for axis in layout.axes_of(dim)) for dim in layout.sharded_dims()
    )


def _wrap_output(
    x: object, i: int, placements: Placements, mesh: Mesh, uneven: bool, varying: frozenset[int]
) -> object:
    if not isinstance(x, Tensor):
        if placements is not None:
            raise LayoutError(f"local_map: output {i} is no tensor, but out_placements lay it out: give None for it")
        return x
    if isinstance(x, DTensor):
        raise LayoutError(
            f"local_map: output {i} is a DTensor: the function must return plain tensors, and out_placements say their "
            "placements"
        )
    layout = replicated(mesh) if placements is None else layout_of(mesh, placements_on(mesh, placements), x.ndim)
    shape = gathered_shape(x, layout) if uneven and layout.sharded_dims() else None
    means = prod(mesh.shape[i] for i, p in enumerate(layout.placements) if p == Partial("avg"))
    if varying and means > 1 and x.requires_grad:
        x = x.view_as(x)
        x.register_hook(lambda grad: grad / means)  # each rank has that part in the mean
    return DTensor.from_local(x, mesh, placements, shape=shape, grad_placements=_partial_on(varying, layout))


@dataclass(frozen=True, slots=True)
class TensorLike:
    """A tensor as a sharding function sees it: shape, dtype and current placements."""

    shape: Shape
    dtype: torch.dtype
    placements: tuple[Placement, ...]

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)


def register_sharding(
    op: OpOverload | list[OpOverload],
) -> Callable[[Callable[..., Sequence[Row]]], Callable[..., Sequence[Row]]]:
    """A decorator for a function that gives the placements on one mesh axis in which the operator may run.

    It gets the operator's arguments, a `TensorLike` for each tensor, and returns pairs of lists: the placements of the
    outputs, and those of the arguments, None for a value that is no tensor. The rows become a rule, which replaces
    dshard's own; dshard expands it to whole meshes, prices it, and takes the cheapest. All replicated is always
    allowed.

    A rule shards each dim of a tensor in one way. Of incompatible rows the first is kept, with a warning.

        @register_sharding(torch.ops.mylib.gated.default)
        def rows(x, gate):
            return [([Shard(dim)], [Shard(dim), Shard(dim)]) for dim in range(x.ndim)]

    Raises:
        ArgumentError: no overload of an operator, or no function.
        LayoutError: at a call, a row with not one placement for each argument or output.
    """
    overloads = list(op) if isinstance(op, list | tuple) else [op]
    for overload in overloads or (op,):
        _check_overload(overload)

    def decorate(function: Callable[..., Sequence[Row]]) -> Callable[..., Sequence[Row]]:
        check_callable(function, "register_sharding", "it decorates a function that returns rows")
        for overload in overloads:
            register(
                overload,
                Operator(partial(_rule_of, function)),
                (function.__doc__ or "as registered").partition("\n")[0],
            )
        return function

    return decorate


def _check_overload(op: object) -> None:
    if isinstance(op, OpOverloadPacket):
        overloads = ", ".join(f"torch.ops.{op}.{name}".replace("::", ".") for name in op.overloads())
        raise ArgumentError(f"register_sharding of {op}, which has several overloads: give some of {overloads}")
    check_type(op, OpOverload, "register_sharding", "give an overload, such as torch.ops.aten.mm.default")


def _rule_of(function: Callable[..., Sequence[Row]], call: Call) -> Rule:
    args, kwargs = pytree.tree_map_only(Spec, _tensor_like, (call.args, call.kwargs))
    rule = _Rows(call)
    for outs, ins in _rows(call, function(*args, **kwargs)):
        rule.add(outs, rule.of_tensors(ins))
    return rule.rule()


def _rows(call: Call, rows: object) -> Iterator[tuple[list[Any], list[Any]]]:
    """The rows that a sharding function returned, checked."""
    way_out = "return a list of pairs ([placements of outputs], [placements of arguments])"
    for row in as_tuple(rows, f"register_sharding of {call.func}", way_out, LayoutError):
        pair = as_tuple(row, f"a row of {call.func}", way_out, LayoutError)
        if len(pair) != 2:
            raise LayoutError(f"a row of {call.func} has {len(pair)} parts: {way_out}")
        outs, ins = (list(as_tuple(side, f"a row of {call.func}", way_out, LayoutError)) for side in pair)
        for placement in (*outs, *ins):
            if placement is not None and not isinstance(placement, _PLACEMENTS):
                raise LayoutError(f"a row of {call.func} has {shown(placement)}, which is no placement: {way_out}")
        yield outs, ins


def _tensor_like(spec: Spec) -> TensorLike:
    return TensorLike(spec.shape, spec.dtype, spec.layout.placements)


class _Rows:
    """A rule made of rows: each row that shards something is a factor, shared by the dims that it shards."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.shapes = (*call.out_shapes, *call.shapes)
        self.terms: list[list[tuple[str, ...]]] = [
            [(f"t{i}d{dim}",) for dim in range(len(shape))] for i, shape in enumerate(self.shapes)
        ]
        self.unsharded = {name for term in self.terms for dim in term for name in dim}
        self.reduce: dict[int, ReduceOp] = {}
        self.sizes: list[tuple[str, int]] = []
        self.passes: list[PassThrough] = []
        self.factors = 0

    def of_tensors(self, ins: list[Placement | None]) -> list[Placement | None]:
        """The placements of the tensors among all arguments."""
        flat = leaves((self.call.args, self.call.kwargs))
        tensors = [i for i, leaf in enumerate(flat) if isinstance(leaf, Spec)]
        if len(ins) == len(flat):
            return [ins[i] for i in tensors]
        if len(ins) >= len(tensors) and all(p is None for p in ins[len(tensors) :]):
            return ins[: len(tensors)]
        raise LayoutError(
            f"register_sharding of {self.call.func}: [{format_of(ins)}] for {len(flat)} arguments: "
            "give a placement for each, None for what is no tensor"
        )

    def add(self, outs: list[Placement | None], ins: list[Placement | None]) -> None:
        """Add one row to the rule, if it is compatible with the rows before."""
        if len(outs) != len(self.call.outs):
            raise LayoutError(
                f"register_sharding of {self.call.func}: [{format_of(outs)}] for {len(self.call.outs)} outputs"
            )
        n = len(outs)
        for i, p in enumerate((*outs, *ins)):
            ndim = len(self.shapes[i])
            if isinstance(p, Shard) and not -ndim <= p.dim < ndim:
                raise LayoutError(f"register_sharding of {self.call.func}: {p} of a tensor of {ndim} dims")
        split = {(i, p.dim % len(self.shapes[i])) for i, p in enumerate((*outs, *ins)) if isinstance(p, Shard)}
        partials = [(i, p.reduce_op) for i, p in enumerate(ins) if isinstance(p, Partial)]
        out_reductions = {i: p.reduce_op for i, p in enumerate(outs) if isinstance(p, Partial)}
        if partials:
            ops = {op for _, op in partials} | set(out_reductions.values())
            if split or len(out_reductions) != n or len(ops) > 1:
                self.drop(outs, ins)
            else:
                self.passes.append(PassThrough(frozenset(i for i, _ in partials), (partials[0][1],)))
        elif split:
            agrees = all(self.reduce.get(i, op) == op for i, op in out_reductions.items())
            whole_out = any(isinstance(p, Replicate) for p in outs)
            if whole_out or not agrees or any(self.terms[i][dim][0] not in self.unsharded for i, dim in split):
                self.drop(outs, ins)
            else:
                self.split(split, out_reductions)

    def split(self, dims: set[tuple[int, int]], out_reductions: dict[int, ReduceOp]) -> None:
        """One factor for all these dims; a dim that is larger than the smallest has an inner factor beside it."""
        size = min(self.shapes[i][dim] for i, dim in dims)
        if size == 0 or any(self.shapes[i][dim] % size for i, dim in dims):
            return
        name = f"f{self.factors}"
        self.factors += 1
        self.sizes.append((name, size))
        self.reduce |= out_reductions
        for i, dim in dims:
            self.terms[i][dim] = (name,)
            if self.shapes[i][dim] > size:
                inner = f"{name}t{i}d{dim}"
                self.terms[i][dim] = (name, inner)
                self.unsharded.add(inner)
                self.sizes.append((inner, self.shapes[i][dim] // size))

    def drop(self, outs: list[Placement | None], ins: list[Placement | None]) -> None:
        """Drop a row that is incompatible with the others, with a warning: it costs a choice, never the result."""
        warn_user(
            f"register_sharding of {self.call.func}: the row [{format_of(ins)}] -> [{format_of(outs)}] does not go "
            "together with those before it and is left out",
            self.call.specs[0].layout.mesh,
        )

    def rule(self) -> Rule:
        """The rule of the rows that were added."""
        n = len(self.call.outs)
        terms: list[Term] = [tuple(term) for term in self.terms]
        reduce = tuple(self.reduce.get(i, "sum") for i in range(n))
        return Rule(
            tuple(terms[n:]),
            tuple(terms[:n]),
            frozenset(self.unsharded),
            reduce,
            tuple(self.passes),
            sizes=tuple(self.sizes),
        )
