"""An operator call becomes a cached executor: rule, strategy, redistributions and local operator, looked up by specs.

The class of distributed tensors is passed in, so that this layer lies below it. Everything an executor needs is looked
up once; a warm call makes a key, finds the executor and runs it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from dshard.comm import LocalTensor, plain, run, runtime_of, stack, unstack
from dshard.errors import MeshError, MixedError
from dshard.layout import Layout, replicated
from dshard.mesh import Coordinate, Mesh
from dshard.ops.call import Call, LocalOp, Op
from dshard.ops.registry import find, replacement
from dshard.ops.spec import Spec, contiguous_stride, spec_of
from dshard.ops.strategy import Operand, Strategy, choose
from dshard.redistribute import Plan, plan
from dshard.topology import default_topology

Executor = Callable[[tuple[Any, ...], dict[str, Any]], Any]
MAX_EXECUTORS = 16384
_EXECUTORS: dict[tuple[Any, ...], Executor] = {}
_WARNED: set[OpOverload] = set()


def dispatch(cls: Any, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func` on distributed tensors of class `cls`, with the result of single-device torch on the whole tensors."""
    custom = replacement(func, args)
    if custom is not None:
        return custom(cls, func, args, kwargs)
    op = find(func)
    values = op is None or op.values
    key = [func, *(_key(cls, arg, values) for arg in args)]
    if kwargs:
        key += [(name, _key(cls, arg, values)) for name, arg in kwargs.items()]
    found = tuple(key)
    executor = _EXECUTORS.get(found)
    if executor is None:
        executor = _build(cls, func, op, args, kwargs)
        if len(_EXECUTORS) >= MAX_EXECUTORS:
            _EXECUTORS.pop(next(iter(_EXECUTORS)))
        _EXECUTORS[found] = executor
    return executor(args, kwargs)


def _key(cls: Any, arg: Any, values: bool) -> Any:
    kind = type(arg)
    if isinstance(arg, cls):
        return arg._spec, type(arg._local) is LocalTensor
    if kind is float or kind is int or kind is bool or kind is complex:
        return (kind, arg) if values else kind
    if kind is list or kind is tuple:
        return tuple(_key(cls, item, values) for item in arg)
    if isinstance(arg, Tensor):
        return Tensor, arg.dtype, arg.shape
    return arg


def _build(cls: Any, func: OpOverload, op: Op | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Executor:
    tensors = [t for t in leaves((args, kwargs)) if isinstance(t, Tensor)]
    mesh = common_mesh(cls, func, tensors)
    if op is None:
        return _without_rule(cls, func)
    specs = tuple(spec_like(cls, t, mesh) for t in tensors)
    template_args, template_kwargs = _with_specs(cls, args, kwargs, specs)
    outs, structure = _infer(func, template_args, template_kwargs)
    call = Call(func, template_args, template_kwargs, specs, outs)
    return _executor(cls, op, call, structure)


def _without_rule(cls: Any, func: OpOverload) -> Executor:
    if func._can_decompose():
        return lambda args, kwargs: func.decompose(*args, **kwargs)
    return lambda args, kwargs: replicate(cls, func, args, kwargs)


def replicate(cls: Any, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func` on whole tensors, on every rank: what is done for an operator without a rule. Warns once for each."""
    if func not in _WARNED:
        _WARNED.add(func)
        warnings.warn(f"{func} has no rule: its operands are gathered and every rank computes all of it", stacklevel=2)
    tensors = [t for t in leaves((args, kwargs)) if isinstance(t, Tensor)]
    mesh = common_mesh(cls, func, tensors)
    whole = replicated(mesh)

    def gathered(leaf: Any) -> Any:
        return move(leaf._local, leaf._spec, whole) if isinstance(leaf, cls) else leaf

    local_args, local_kwargs = replace_leaves((args, kwargs), gathered)
    result = run_on_ranks(mesh, lambda coordinate: func, local_args, local_kwargs)
    for given, argument, local in zip(args, func._schema.arguments, local_args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(given, cls):
            write_local(given._local, move(local, given._spec.with_layout(whole), given._spec.layout))
    if _is_inplace(func):
        return args[0]
    return replace_leaves(result, lambda leaf: cls._wrap(leaf, _whole_spec(leaf, whole)) if isinstance(leaf, Tensor) else leaf)


def _whole_spec(local: Tensor, whole: Layout) -> Spec:
    one = next(iter(unstack(local).values())) if type(local) is LocalTensor else local
    return spec_of(whole, tuple(one.shape), one.stride(), one.dtype, one.device)


def move(local: Tensor, spec: Spec, layout: Layout) -> Tensor:
    """The local tensor under another layout; not recorded by autograd."""
    return run(plan(spec.layout, layout, spec.shape, spec.itemsize, topology_of(layout.mesh)), local)


def _with_specs(cls: Any, args: Any, kwargs: Any, specs: tuple[Spec, ...]) -> tuple[Any, Any]:
    rest = iter(specs)
    return replace_leaves((args, kwargs), lambda leaf: next(rest) if isinstance(leaf, Tensor) else leaf)  # type: ignore[no-any-return]


def _infer(func: OpOverload, args: Any, kwargs: Any) -> tuple[tuple[Tensor, ...], Any]:
    """The outputs single-device torch gives, without data, and how they are arranged. Raises torch's own errors."""
    meta_args, meta_kwargs = replace_leaves((args, kwargs), lambda leaf: leaf.meta() if isinstance(leaf, Spec) else leaf)
    if isinstance(meta_kwargs.get("device"), torch.device):
        meta_kwargs["device"] = torch.device("meta")
    result = func(*meta_args, **meta_kwargs)
    return tuple(t for t in leaves(result) if isinstance(t, Tensor)), result


def _executor(cls: Any, op: Op, call: Call, structure: Any) -> Executor:
    mesh = call.specs[0].layout.mesh
    mutated = _is_inplace(call.func)
    strategy = strategy_of(op, call, keep=mutated)
    plans = [
        plan(spec.layout, layout, spec.shape, spec.itemsize, topology_of(mesh))
        for spec, layout in zip(call.specs, strategy.inputs, strict=True)
    ]
    if mutated and plans[0].steps:
        back = plan(strategy.outputs[0], call.specs[0].layout, call.specs[0].shape, call.specs[0].itemsize, topology_of(mesh))
        return _Rewrite(cls, op, call, strategy, plans, structure, back)
    return _Run(cls, op, call, strategy, plans, structure, mutated)


def strategy_of(op: Op, call: Call, keep: bool = False) -> Strategy:
    """The cheapest strategy; with `keep`, one that leaves the first operand in its layout where there is such."""
    operands = [Operand(spec.layout, spec.shape, spec.itemsize) for spec in call.specs]
    outputs = [(tuple(out.shape), out.itemsize) for out in call.outs]
    topology = topology_of(call.specs[0].layout.mesh)
    return choose(op.rule(call), operands, outputs, topology, operands[0].layout if keep else None)


def topology_of(mesh: Mesh) -> Any:
    """The topology on which choices for this mesh are priced."""
    return default_topology(mesh.device_type)


class _Run:
    """Redistribute the operands, run the local operator, wrap its outputs."""

    def __init__(self, cls: Any, op: Op, call: Call, strategy: Strategy, plans: list[Plan], structure: Any, mutated: bool) -> None:
        self.cls, self.op, self.call, self.strategy, self.plans, self.mutated = cls, op, call, strategy, plans, mutated
        self.single = isinstance(structure, Tensor)
        self.structure = structure
        self.out_specs = [
            spec_of(layout, tuple(out.shape), out.stride(), out.dtype, call.specs[0].device)
            for out, layout in zip(call.outs, strategy.outputs, strict=True)
        ]
        self.flat = not call.kwargs and all(not isinstance(arg, list | tuple) for arg in call.args)
        self.local: LocalOp | None = None
        self.moves: list[tuple[int, Callable[[Tensor], Tensor]]] = []

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = self.run_local(args, kwargs)
        if self.mutated:
            return args[0]
        if self.single:
            return self.cls._wrap(out, self.out_specs[0])
        rest = iter(zip((t for t in leaves(out) if isinstance(t, Tensor)), self.out_specs, strict=True))
        return replace_leaves(self.structure, lambda leaf: self.cls._wrap(*next(rest)) if isinstance(leaf, Tensor) else leaf)

    def run_local(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The local outputs of this rank, or of all simulated ones."""
        moved = iter(self.moved([_local(t, self.cls) for t in leaves((args, kwargs)) if isinstance(t, Tensor)]))
        local_args, local_kwargs = replace_leaves((args, kwargs), lambda leaf: next(moved) if isinstance(leaf, Tensor) else leaf)
        return run_on_ranks(self.call.specs[0].layout.mesh, self._local_op, local_args, local_kwargs)

    def moved(self, locals_: list[Tensor]) -> list[Tensor]:
        """The local operands under the strategy's layouts."""
        return [run(p, t) if p.steps else t for p, t in zip(self.plans, locals_, strict=True)]

    def _local_op(self, coordinate: Coordinate) -> LocalOp:
        if self.op.kernel is None:
            return self.call.func
        return self.op.kernel(self.call, self.strategy, coordinate)


class _Rewrite(_Run):
    """An in-place operator that cannot work in its operand's layout: compute elsewhere, bring it back, write it."""

    def __init__(self, cls: Any, op: Op, call: Call, strategy: Strategy, plans: list[Plan], structure: Any, back: Plan) -> None:
        super().__init__(cls, op, call, strategy, plans, structure, True)
        self.back = back

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        write_local(args[0]._local, run(self.back, self.run_local(args, kwargs)))
        return args[0]


def write_local(target: Tensor, value: Tensor) -> None:
    """Write the local tensor `value` into `target`."""
    if type(target) is LocalTensor:
        with plain():
            for rank, t in unstack(value).items():
                unstack(target)[rank].copy_(t)
    else:
        target.copy_(value)


def run_on_ranks(mesh: Mesh, local_op: Callable[[Coordinate], LocalOp], args: Any, kwargs: Any) -> Any:
    """The local operator on this rank, on all simulated ranks, or, without processes, as the first rank of the mesh."""
    if any(type(leaf) is LocalTensor for leaf in leaves((args, kwargs))):
        return _simulate(mesh, local_op, args, kwargs)
    runtime = runtime_of(mesh)
    coordinate = (0,) * mesh.ndim if runtime is None else runtime.coordinate
    if coordinate is None:
        raise MeshError(f"this rank is not in the mesh ({mesh}): run operators on ranks {mesh.ranks} alone")
    return local_op(coordinate)(*args, **kwargs)


def _simulate(mesh: Mesh, local_op: Callable[[Coordinate], LocalOp], args: Any, kwargs: Any) -> Any:
    results = {}
    with plain():
        for rank in mesh.ranks:

            def pick(leaf: Any, rank: int = rank) -> Any:
                return unstack(leaf)[rank] if type(leaf) is LocalTensor else leaf

            rank_args, rank_kwargs = replace_leaves((args, kwargs), pick)
            results[rank] = local_op(mesh.coordinate(rank))(*rank_args, **rank_kwargs)
        first = next(iter(results.values()))
        flat = {rank: [t for t in leaves(result) if isinstance(t, Tensor)] for rank, result in results.items()}
        rest = iter(range(len(flat[mesh.ranks[0]])))

        def join(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            i = next(rest)
            return stack({rank: found[i] for rank, found in flat.items()})

        return replace_leaves(first, join)


def common_mesh(cls: Any, func: object, tensors: list[Tensor]) -> Mesh:
    """The mesh of all distributed tensors among `tensors`.

    Raises:
        MeshError: they lie on different meshes.
        MixedError: a plain tensor with dims is among them.
    """
    meshes = {t._spec.layout.mesh for t in tensors if isinstance(t, cls)}
    if len(meshes) > 1:
        listed = " and ".join(f"({mesh}) of ranks {mesh.ranks}" for mesh in meshes)
        raise MeshError(f"{func}: operands on the meshes {listed}; redistribute them to one mesh first")
    for t in tensors:
        if not isinstance(t, cls) and t.dim() > 0:
            raise MixedError(
                f"{func}: a plain torch.Tensor of shape {tuple(t.shape)} among distributed tensors; wrap it with "
                "distribute_tensor(x, mesh, placements), or DTensor.from_local if each rank has a part; 0-d tensors are taken as they are"
            )
    return meshes.pop()


def spec_like(cls: Any, t: Tensor, mesh: Mesh) -> Spec:
    """The spec of an operand; a plain 0-d tensor counts as replicated."""
    if isinstance(t, cls):
        found: Spec = t._spec
        return found
    return spec_of(replicated(mesh), tuple(t.shape), contiguous_stride(tuple(t.shape)), t.dtype, t.device)


def _local(t: Any, cls: Any) -> Tensor:
    return t._local if isinstance(t, cls) else t  # type: ignore[no-any-return]


def _is_inplace(func: OpOverload) -> bool:
    arguments = func._schema.arguments
    return bool(arguments) and arguments[0].alias_info is not None and arguments[0].alias_info.is_write


def leaves(tree: Any) -> list[Any]:
    """The leaves of nested tuples, lists and dicts, in order."""
    if isinstance(tree, list | tuple):
        return [leaf for item in tree for leaf in leaves(item)]
    if isinstance(tree, dict):
        return [leaf for item in tree.values() for leaf in leaves(item)]
    return [tree]


def replace_leaves(tree: Any, change: Callable[[Any], Any]) -> Any:
    """The same nest with each leaf changed, in order."""
    if isinstance(tree, list | tuple):
        return type(tree)(replace_leaves(item, change) for item in tree)
    if isinstance(tree, dict):
        return {name: replace_leaves(item, change) for name, item in tree.items()}
    return change(tree)


