"""Operators on lists of tensors: one local call if each entry's tensors have one layout, else entry by entry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from operator import attrgetter
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from dshard.autograd.crossing import as_distributed
from dshard.comm import is_absent, traced
from dshard.core.call import LocalOp, overloads
from dshard.core.executable import ComposedExecutable, decision_of
from dshard.core.moves import operator_on, redistribute_local, run_on_ranks, write_local
from dshard.core.observe import ASKED
from dshard.core.operands import number_on, plain_value
from dshard.core.signature import Args, Function, Kwargs
from dshard.core.spec import Spec, contiguous_spec, spec_of
from dshard.core.view_sync import propagate_write
from dshard.core.wrapper import Wrapper, wrap
from dshard.errors import LayoutError, ScheduleError
from dshard.layout import Layout, replicated
from dshard.mesh import Coordinate, Mesh
from dshard.ops.decompositions import power_sum, real_dtype, root, widened
from dshard.ops.pointwise import adds_up, adds_up_by_numbers
from dshard.placements import Partial, Placement, Replicate, Shard
from dshard.rules.strategy import completed_layout
from dshard.torch_private import (
    DispatchKey,
    OpOverload,
    increment_version,
    is_alias_of,
    list_types,
    optimizer_list_types,
)

ForEach: TypeAlias = Callable[[OpOverload, Args, Kwargs], ComposedExecutable]
"""Plans the calls of an operator with arguments like these."""


def support() -> None:
    """Let optimisers and gradient clipping use operators on lists of DTensors by default.

    torch looks for the type of each tensor in two lists, which have no function to add to.
    """
    cls = Wrapper.public
    for known in (optimizer_list_types, list_types):
        if cls not in known:
            known.append(cls)


def one_by_one(func: OpOverload, args: Args, kwargs: Kwargs) -> ComposedExecutable:
    """Entry by entry: torch's own loop over the operator for one tensor; each of its calls has a decision."""
    return ComposedExecutable(None, partial(_one_by_one, func))


def _one_by_one(func: OpOverload, args: Args, kwargs: Kwargs) -> object:
    return func._op_dk(DispatchKey.CompositeExplicitAutograd, *args, **kwargs)


def counted(plan: ForEach) -> ForEach:
    """The plan of an in-place operator that counts writes, as torch counts none to list entries below autograd."""

    def planned(func: OpOverload, args: Args, kwargs: Kwargs) -> ComposedExecutable:
        executable = plan(func, args, kwargs)
        return ComposedExecutable(executable.decision, partial(_counted, executable.run))

    return planned


def _counted(run: Function, args: Args, kwargs: Kwargs) -> object:
    out = run(args, kwargs)
    written: list[Tensor] = []
    for t in args[0]:
        if isinstance(t, Wrapper):
            local = t._local_tensor
            if type(local) is Tensor:
                written += (t, local)
            elif not traced(local):
                written.append(t)
    increment_version(written)  # all by one call
    return out


def by_mesh(plan: ForEach) -> ForEach:
    """The plan of an operator on lists with entries on several meshes, or plain: one call for each of these."""

    def planned(func: OpOverload, args: Args, kwargs: Kwargs) -> ComposedExecutable:
        positions: dict[Mesh | None, list[int]] = {}
        for i, row in enumerate(_rows(args) or ()):
            mesh = next((t._spec.layout.mesh for t in row if isinstance(t, Wrapper)), None)
            positions.setdefault(mesh, []).append(i)
        if len(positions) < 2 and None not in positions:
            return plan(func, args, kwargs)
        return ComposedExecutable(None, partial(_by_mesh, func, positions))

    return planned


def _by_mesh(func: OpOverload, positions: dict[Mesh | None, list[int]], args: Args, kwargs: Kwargs) -> object:
    n = sum(map(len, positions.values()))
    results: dict[int, object] = {}
    for mesh, entries in positions.items():

        def of_mesh(arg: object, entries: list[int] = entries, mesh: Mesh | None = mesh) -> object:
            if isinstance(arg, list | tuple):
                return [arg[i] for i in entries] if len(arg) == n else arg
            return plain_value(func, arg) if mesh is None and isinstance(arg, Wrapper) else arg

        out = func(*map(of_mesh, args), **{name: of_mesh(arg) for name, arg in kwargs.items()})
        results |= zip(entries, out or (), strict=False)
    return [results[i] for i in range(n)] if results else None


def elementwise(func: OpOverload, args: Args, kwargs: Kwargs) -> ComposedExecutable:
    """One local call on the lists of local tensors, where that is correct."""
    name = func._schema.name.removeprefix("aten::_foreach_").removesuffix("_")
    n_lists = sum(str(argument.type) == "List[Tensor]" for argument in func._schema.arguments)
    is_linear = adds_up(name, n_lists) and adds_up_by_numbers(name, args, kwargs)
    specs = _specs_alike(_rows(args), is_linear)
    if specs is None:
        return one_by_one(func, args, kwargs)
    return ComposedExecutable(decision_of(func, args, kwargs), partial(_elementwise, func, specs))


def _elementwise(func: OpOverload, specs: Sequence[Spec], args: Args, kwargs: Kwargs) -> object:
    mesh = specs[0].layout.mesh
    local_args = [_local(func, arg, mesh) for arg in args]
    local_kwargs = {name: _local(func, arg, mesh) for name, arg in kwargs.items()}
    if func._schema.is_mutable and (any(map(_origin_of, args[0])) or _share_memory(*local_args)):
        return _one_by_one(func, args, kwargs)
    out = _run_on_lists(mesh, func, local_args, local_kwargs)
    if out is None:
        return None
    return [wrap(t, spec.with_dtype(t.dtype)) for t, spec in zip(out, specs, strict=True)]


_origin_of = attrgetter("_view_sync")
"""Gives the origin of a view with memory of its own."""


def _share_memory(written: Sequence[Tensor], *others: Any) -> bool:
    """Whether a tensor that is written shares memory with another one of its entry."""
    lists = [other for other in others if isinstance(other, list) and isinstance(other[0], Tensor)]
    return any(any(map(is_alias_of, written, tensors)) for tensors in lists)


def _run_on_lists(mesh: Mesh, func: OpOverload, args: Sequence[object], kwargs: Kwargs) -> Any:
    """Run an operator on lists of local tensors; those of the first list tell whether all ranks are simulated."""
    first = next(arg[0] for arg in args if isinstance(arg, list | tuple))
    return operator_on(mesh, lambda coordinate: func, [first])(*args, **kwargs)


def norms(func: OpOverload, args: Args, kwargs: Kwargs) -> ComposedExecutable:
    """The norm of each tensor: the terms of all tensors of one dtype are reduced by one collective."""
    decision = decision_of(func, args, kwargs, why=ASKED)  # clipping needs them of all gradients
    tensors, _, dtype = _norm_arguments(*args, **kwargs)
    if not all(isinstance(t, Wrapper) and t.numel() for t in tensors):
        return ComposedExecutable(decision, partial(_one_by_one, func))
    groups: dict[torch.dtype, list[int]] = {}
    for i, t in enumerate(tensors):
        groups.setdefault(t.dtype if dtype is None else dtype, []).append(i)
    return ComposedExecutable(decision, partial(_norms_of_groups, func, groups))


def _norms_of_groups(
    func: OpOverload, groups: dict[torch.dtype, list[int]], args: Args, kwargs: Kwargs
) -> list[object]:
    tensors, ord, _ = _norm_arguments(*args, **kwargs)
    results: dict[int, object] = {}
    for kind, positions in groups.items():
        results |= zip(positions, _norms(func, [tensors[i] for i in positions], ord, kind), strict=True)
    return [results[i] for i in range(len(tensors))]


def _norm_arguments(tensors: Sequence[object], ord: float = 2, dtype: torch.dtype | None = None) -> tuple[Any, ...]:
    return tensors, ord, dtype


def _terms_layout(layouts: Sequence[Layout], ord: float) -> Layout:
    """The layout of the terms of norms, one for each local tensor: partial along the axes that shard any tensor."""
    reduction: Placement = Partial("max" if ord == inf else "min" if ord == -inf else "sum")
    sharded = [any(isinstance(p, Shard) for p in axis) for axis in zip(*(x.placements for x in layouts), strict=True)]
    return Layout(layouts[0].mesh, tuple(reduction if shards else Replicate() for shards in sharded))


def _norms(func: OpOverload, tensors: Sequence[Any], ord: float, dtype: torch.dtype) -> list[object]:
    mesh, n, spec, kind = tensors[0]._spec.layout.mesh, len(tensors), tensors[0]._spec, real_dtype(dtype)
    layouts = [completed_layout(t._spec.layout) for t in tensors]
    parts = [redistribute_local(t._local_tensor, t._spec, to, func) for t, to in zip(tensors, layouts, strict=True)]
    layout = _terms_layout(layouts, ord)

    def make_terms(coordinate: Coordinate) -> LocalOp:
        gives = [_gives_term(each, layout, coordinate) for each in layouts]
        return partial(_terms, gives=gives, ord=ord, dtype=dtype)

    terms = run_on_ranks(mesh, make_terms, (parts,), {})
    gathered = redistribute_local(terms, spec_of(layout, (n,), (1,), terms.dtype, spec.device), replicated(mesh), func)
    norms = run_on_ranks(mesh, lambda coordinate: partial(_roots, ord=ord, dtype=kind), (gathered,), {})
    out = spec_of(replicated(mesh), (), (), kind, spec.device)
    return [wrap(norm, out) for norm in norms]


def _gives_term(layout: Layout, terms: Layout, coordinate: Coordinate) -> bool:
    """Whether this rank adds a term of a tensor: among replicas along an axis that other tensors shard, the first."""
    axes = zip(layout.placements, terms.placements, coordinate, strict=True)
    return all(i == 0 for placement, term, i in axes if isinstance(term, Partial) and placement == Replicate())


def _terms(parts: Sequence[Tensor], gives: Sequence[bool], ord: float, dtype: torch.dtype) -> Tensor:
    return torch.stack([_term(widened(part.to(dtype)), gives, ord) for part, gives in zip(parts, gives, strict=True)])


def _term(part: Tensor, gives: bool, ord: float) -> Tensor:
    if not gives and ord not in (inf, -inf):
        return part.new_zeros((), dtype=real_dtype(part.dtype))
    if ord not in (inf, -inf):
        return power_sum(part, ord)
    if not part.numel():
        return part.new_full((), -ord, dtype=real_dtype(part.dtype))
    return part.abs().amax() if ord > 0 else part.abs().amin()


def _roots(gathered: Tensor, ord: float, dtype: torch.dtype) -> list[Tensor]:
    norms = gathered if ord in (inf, -inf) else root(gathered, ord)
    return [norm.clone() for norm in norms.to(dtype).unbind()]


def fused(func: OpOverload, args: Args, kwargs: Kwargs) -> ComposedExecutable:
    """A whole optimiser step as one local call: gradients and states are redistributed to their parameters' layouts.

    Redistributions of the gradients count as requested by the user, those of the states do not: each is a decision.
    """
    layouts = [_without_partial(func, t._spec.layout) for t in args[0]]
    return ComposedExecutable(None, partial(_fused, func, layouts))


def _fused(func: OpOverload, layouts: Sequence[Layout], args: Args, kwargs: Kwargs) -> None:
    mesh = layouts[0].mesh
    if is_absent(args[0][0]._local_tensor, mesh):  # not each of these operators runs without data
        return
    shapes = [t._spec.shape for t in args[0]]
    args = tuple(  # a plain gradient or state counts as replicated
        [as_distributed(t, layouts[i]) if t.dim() and t.shape == shapes[i] else t for i, t in enumerate(arg)]
        if isinstance(arg, list | tuple)
        else arg
        for arg in args
    )

    def redistributed(i: int, t: Wrapper, explicit: bool) -> Tensor:
        layout = layouts[i] if t._spec.shape == shapes[i] else replicated(mesh)
        if t._spec.layout is layout:
            return t._local_tensor
        return redistribute_local(t._local_tensor, t._spec, layout, func, explicit)

    cls = Wrapper.public
    local_args = [  # gradients come to their parameters as after backward
        [
            t._local_tensor
            if type(t) is cls and t._spec.layout is layouts[i]
            else (redistributed(i, t, arg is args[1]) if isinstance(t, Wrapper) else t)
            for i, t in enumerate(arg)
        ]
        if isinstance(arg, list | tuple)
        else _local(func, arg, mesh)
        for arg in args
    ]
    for arg in local_args[1:]:  # torch's kernels pair elements by their place in memory
        for i, x in enumerate(arg if isinstance(arg, list) else ()):
            parameter = local_args[0][i]
            if x.stride() != parameter.stride() and x.shape == parameter.shape:
                arg[i] = torch.empty_like(parameter, dtype=x.dtype).copy_(x)
    local_kwargs = {name: _local(func, arg, mesh) for name, arg in kwargs.items()}
    _run_on_lists(mesh, func, local_args, local_kwargs)
    for parameter, argument, local in zip(func._schema.arguments, args, local_args, strict=False):
        if argument and parameter.alias_info is not None and parameter.alias_info.is_write:
            _write_back(func, argument, local, layouts)
            if argument is not args[0]:  # whose views follow each in-place operator
                propagate_write(argument, func)


def _without_partial(func: OpOverload, layout: Layout) -> Layout:
    if layout.partial_axes():
        raise LayoutError(
            f"{func} cannot update a parameter laid out [{layout}]: redistribute it to Shard or Replicate first"
        )
    return layout


def _write_back(func: OpOverload, originals: Sequence[object], local: Sequence[Any], layouts: Sequence[Layout]) -> None:
    """Write back what the operator wrote into redistributed copies of its arguments."""
    for t, written, layout in zip(originals, local, layouts, strict=True):
        if isinstance(t, Wrapper) and written is not t._local_tensor:
            write_local(t._local_tensor, redistribute_local(written, t._spec.with_layout(layout), t._spec.layout, func))


STAGES: WeakValueDictionary[Mesh, Any] = WeakValueDictionary()
"""The pipeline of which each mesh is a stage; its attribute `unscales` says whether all stages unscale now."""


def unscale(func: OpOverload, args: Args, kwargs: Kwargs) -> ComposedExecutable:
    """Unscale the gradients of a scaled loss, in place; all ranks learn whether any of them is infinite."""
    return ComposedExecutable(decision_of(func, args, kwargs, why=ASKED), partial(_unscale, func))


def _unscale(func: OpOverload, args: Args, kwargs: Kwargs) -> None:
    grads, found_inf, scale = args
    mesh = next(t for t in grads if isinstance(t, Wrapper))._spec.layout.mesh
    pipeline = STAGES.get(mesh)
    if pipeline is not None and not pipeline.unscales:
        raise ScheduleError(
            "a GradScaler of the gradients of one stage: others would step where these are infinite, or not; call "
            "pipeline.unscale_(scaler, optimizer) on all ranks before scaler.step(optimizer)"
        )
    flag, local = _local(func, found_inf, mesh), _local(func, grads, mesh)
    run_on_ranks(mesh, lambda coordinate: func, (local, flag, _local(func, scale, mesh)), {})
    layout, shape = Layout(mesh, (Partial("max"),) * mesh.ndim), tuple(found_inf.shape)
    terms = contiguous_spec(layout, shape, found_inf.dtype, found_inf.device)
    write_local(
        found_inf._local_tensor if isinstance(found_inf, Wrapper) else found_inf,
        redistribute_local(flag, terms, replicated(mesh), func),
    )


# -- layouts that agree


def _rows(args: Sequence[object]) -> list[tuple[Any, ...]] | None:
    """The tensors of each entry, or None if the lists differ in length."""
    lists = [arg for arg in args if isinstance(arg, list | tuple) and arg and isinstance(arg[0], Tensor)]
    return list(zip(*lists, strict=True)) if len({len(arg) for arg in lists}) == 1 else None


def _specs_alike(rows: list[tuple[object, ...]] | None, is_linear: bool) -> list[Spec] | None:
    """The spec of each entry, if all its tensors have one layout in which the operator can run, on one mesh."""
    if rows is None:
        return None
    specs = [_spec_alike(row, is_linear) for row in rows]
    common = [spec for spec in specs if spec is not None]
    return common if len(common) == len(specs) and len({spec.layout.mesh for spec in common}) == 1 else None


def _spec_alike(row: tuple[Any, ...], is_linear: bool) -> Spec | None:
    if not isinstance(row[0], Wrapper):
        return None
    first: Spec = row[0]._spec
    for t in row[1:]:
        if isinstance(t, Wrapper):
            spec = t._spec
            if spec is not first and (spec.shape != first.shape or spec.layout != first.layout):
                return None
        elif t.dim():
            return None
    if first.layout.partial_axes() and not (is_linear and _adds_up(first, row)):
        return None
    return first


def _adds_up(spec: Spec, row: Sequence[object]) -> bool:
    """Whether all partial placements are sums, of tensors of one dtype that has fractions."""
    partials = {spec.layout.placements[axis] for axis in spec.layout.partial_axes()}
    alike = all(isinstance(t, Wrapper) and t.dtype == spec.dtype for t in row)
    return alike and spec.dtype.is_floating_point and partials <= {Partial("sum"), Partial("avg")}


def _local(func: OpOverload, arg: object, mesh: Mesh) -> Any:
    """The local tensors of a list; of a single tensor, a factor for all entries, the gathered value."""
    if isinstance(arg, list | tuple):
        return [t._local_tensor if isinstance(t, Wrapper) else t for t in arg]
    return number_on(func, arg, mesh) if isinstance(arg, Wrapper) else arg


_NOT_ELEMENTWISE: dict[str, ForEach] = {
    "_foreach_max": one_by_one,
    "_foreach_mm": one_by_one,
    "_foreach_powsum": one_by_one,
    "_foreach_norm": norms,
}
_FUSED = ("_fused_adagrad_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_")


FOREACH: dict[OpOverload, ForEach] = {
    **{
        func: by_mesh(counted(plan) if name.endswith("_") else plan)
        for name in dir(torch)
        if name.startswith("_foreach_")
        for plan in [_NOT_ELEMENTWISE.get(name, elementwise)]
        for func in overloads(name)
    },
    **{func: by_mesh(counted(fused)) for name in _FUSED for func in overloads(name)},
    torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default: by_mesh(unscale),
}
"""The plan of each operator on lists."""

INDEPENDENT_OF_VALUES = frozenset(FOREACH) - frozenset(overloads("_foreach_norm"))
"""The operators on lists whose plan does not depend on the values of numbers, which optimisers change at each step."""
