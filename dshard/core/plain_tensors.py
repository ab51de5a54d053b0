"""Plain tensors among distributed ones: they count as replicated where the program has said that they are alike.

It has where a module on the mesh is laid out with whole batches, where they are compared between ranks; within the
forward pass of any module that is laid out, since every rank runs the same program on inputs that are distributed; and
within `implicit_replication`. Elsewhere a user's are refused, torch's own are not.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from threading import local
from typing import Any, Literal, TypeAlias, TypeGuard
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary
from zlib import crc32

import torch
from torch import Tensor, UntypedStorage, is_grad_enabled
from torch.compiler import is_compiling
from torch.nn import Parameter
from torch.nn.init import sparse_
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from dshard.callers import asked_by, callers
from dshard.comm import (
    WAITED_FOR,
    LocalTensor,
    are_simulated,
    checksum,
    compare_calls,
    comparing,
    gather_rows,
    has_only_shape,
    is_alike_on_simulated,
    is_any_meta,
    is_own,
    of_first_rank,
    on_all_ranks,
    plain,
    simulated_ranks,
    user_frame,
)
from dshard.core.comparisons import Comparisons, comparisons_on
from dshard.core.local_checks import refuse_other_forms
from dshard.core.moves import wrap_counting
from dshard.core.operands import plain_value
from dshard.core.signature import Args, Context, Function, Kwargs
from dshard.core.spec import contiguous_spec
from dshard.core.subclasses import as_plain, kind_of, refuse_own_rules
from dshard.core.torch_tensors import are_torchs, from_torchs
from dshard.core.transforms import is_differentiating_forward
from dshard.core.trees import leaves, replace_leaves, tensors_in
from dshard.core.wrapper import Wrapper
from dshard.errors import LayoutError, MixedError
from dshard.layout import Layout, replicated
from dshard.mesh import Mesh
from dshard.torch_dtensor import TorchDTensor, counts_plain_as_replicated
from dshard.torch_private import FakeTensor, FunctionalTensor, graph_task_id

PlainMode: TypeAlias = Literal["global", "per-data-rank", "both"]
_MODELS: dict[tuple[Mesh, bool], WeakSet[object]] = {}
"""What stands for the models that were laid out on a mesh, by whether plain tensors are parts of data ranks."""
_ROWS: dict[Mesh, Layout] = {}
"""The layout in which the last model on a mesh that is given whole batches computes with rows."""


def declare_model(model: object, rows: Layout, per_data_rank: bool) -> None:
    """Declare that a model is given whole batches, alike on all ranks of the mesh, or the rows of each data rank.

    `rows` is the layout in which it computes with tensors of rows.
    """
    _MODELS.setdefault((rows.mesh, per_data_rank), WeakSet()).add(model)
    if not per_data_rank:
        _ROWS[rows.mesh] = rows
    _MEANS.pop(rows.mesh, None)  # until a model that gives plain rows is called
    comparisons_on(rows.mesh).restart()


_MEANS: dict[Mesh, tuple[Layout, float]] = {}
"""The partial layout of the mean over the rows of all data ranks, and this rank's share of the rows."""


def declare_shares(terms: Layout, share: float) -> None:
    """Declare that recorded numbers of the program may be means over the rows of a data rank, with this share of all.

    `terms` is the layout of what the data ranks add to the mean over all rows.
    """
    _MEANS[terms.mesh] = terms, share


def plain_mode(mesh: Mesh) -> PlainMode | None:
    """Plain tensors in programs on this mesh: whole, rows, "both" if models differ; None without a model."""
    kinds = [kind for kind in (False, True) if (mesh, kind) in _MODELS]
    if len(kinds) == 2:
        gc.collect()  # so that all ranks have freed the models that are no longer used
        for kind in kinds:
            if not _MODELS[mesh, kind]:
                del _MODELS[mesh, kind]
        kinds = [kind for kind in kinds if (mesh, kind) in _MODELS]
    return ("both" if len(kinds) == 2 else "per-data-rank" if kinds[0] else "global") if kinds else None


def is_of_whole(collective: str, layouts: Sequence[Layout], ranks: Iterable[int]) -> bool:
    """Whether a collective does to whole tensors what it does to whole plain ones that are alike on all `ranks`."""
    mesh = layouts[0].mesh
    return (
        collective in _OF_WHOLE
        and {*ranks} == {*mesh.ranks}
        and all(layout.mesh == mesh and layout.is_replicated() for layout in layouts)
        and (WAITED_FOR.in_force() or plain_mode(mesh) == "global")  # a model that is planned is not declared yet
    )


_OF_WHOLE = ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "broadcast", "reduce")
"""Collectives that do to a whole tensor what they do to one that is alike on all ranks."""


def layout_of_rows(mesh: Mesh) -> Layout:
    """The layout in which models on a mesh that are given whole batches compute with rows."""
    return _ROWS[mesh]


PLAIN = frozenset({Tensor, Parameter, LocalTensor, FakeTensor, FunctionalTensor, TorchDTensor, list, tuple})
"""The types of arguments that are, or may hold, plain tensors or torch's own distributed ones."""

_INT = frozenset({int})


def may_hold_plain(values: Iterable[object]) -> bool:
    """Whether there may be a plain tensor among `values`."""
    cls = Wrapper.public
    for value in values:
        kind = type(value)
        if kind is cls:
            continue
        if kind_of(kind) or (kind in PLAIN and not (type(value) is tuple and _INT.issuperset(map(type, value)))):
            return True
    return False


PLAIN_RESULTS = frozenset({Tensor, LocalTensor})
"""The types of plain results that a composite operator may return for distributed operands."""

_HARMLESS = frozenset(
    {
        "backward",
        "grad",
        "__set__",
        "_has_compatible_shallow_copy_type",
        "to",
        "type_as",
        "view_as",
        "reshape_as",
        "expand_as",
        "flex_attention",
    }
)
"""Functions that use a plain tensor's shape or dtype alone, or take a gradient or block mask equal on all ranks."""


_OF_GRAPHS = frozenset({"backward", "grad"})
"""Functions that take plain tensors as leaves and gradients of a graph."""

_COPY = Tensor.copy_
_ON_LISTS = ("_foreach_", "_fused_", "_amp_foreach_")
"""The prefixes of operators on lists, whose entries are independent of each other."""


class _CountedAsReplicated(local):
    depth = 0
    refused = False
    forwards = 0


_COUNTED_AS_REPLICATED = _CountedAsReplicated()
_PARTS: WeakKeyDictionary[UntypedStorage, int] = WeakKeyDictionary()
"""The memory of what `to_local` gave of tensors that are not replicated, with the number of entries of that."""


def is_part(x: Tensor) -> None:
    """Declare that a plain tensor is this rank's part of a distributed one."""
    _PARTS[x.untyped_storage()] = x.numel()


@contextmanager
def refusing_plain(in_forward: bool = False) -> Iterator[None]:
    """Refuse plain tensors among distributed ones within the block, though models are given whole batches.

    With `in_forward` those are refused, too, that count as replicated within a forward pass.
    """
    counted = _COUNTED_AS_REPLICATED
    before, counted.refused = (counted.depth, counted.refused), True
    counted.depth *= not in_forward
    try:
        yield
    finally:
        counted.depth, counted.refused = before


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Count plain tensors among distributed ones as replicated within the block: they must be equal on all ranks.

    With `DSHARD_DEBUG=1` the ranks compare them. Their gradients are plain, and complete on every rank.
    torch's own `torch.distributed.tensor.experimental.implicit_replication` does the same.
    """
    count_as_replicated(1)
    try:
        yield
    finally:
        count_as_replicated(-1)


def count_as_replicated(change: int, forward: bool = False) -> None:
    """Enter a block of `implicit_replication` on this thread, by 1, or leave one, by -1; one around a forward pass."""
    _COUNTED_AS_REPLICATED.depth += change
    _COUNTED_AS_REPLICATED.forwards += change * forward


def is_within_forward() -> bool:
    """Whether this thread runs the forward pass of a laid-out module."""
    return _COUNTED_AS_REPLICATED.forwards > 0


def wrap_or_refuse_plain(func: Function, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """The arguments, with torch's distributed tensors as dshard's, and plain tensors wrapped as replicated or refused.

    A plain tensor is written to from distributed ones as it is: every rank writes their global values.

    Plain tensors are wrapped within `implicit_replication`, and within torch's, in the step of an optimiser, and as the
    source of a `copy_` into a distributed tensor, as in `load_state_dict`: each rank takes its part. So are tensors of
    one element that need a gradient, anywhere.
    """
    flat = leaves((args, kwargs))  # once: an optimiser's lists have several tensors for each parameter
    kinds = set(map(type, flat))
    if True not in [issubclass(kind, Tensor) for kind in kinds - {Wrapper.public}]:
        return args, kwargs
    refuse_own_rules(getattr(func, "__name__", str(func)), kinds)
    if are_torchs(kinds):
        args, kwargs = from_torchs(args, kwargs)
        flat = leaves((args, kwargs))
    is_copied = func is _COPY and isinstance(args[0], Wrapper)
    takes_all, compared = bool(_COUNTED_AS_REPLICATED.depth or counts_plain_as_replicated() or is_copied), None
    tensors = [leaf for leaf in flat if isinstance(leaf, Tensor)]
    if is_differentiating_forward() and all(map(has_only_shape, tensors)):  # torch asks for the shape of a zero tangent
        takes_all = True
    meshes = [t._spec.layout.mesh for t in tensors if isinstance(t, Wrapper)]
    if _writes_to_plain(func, args, kwargs):
        is_recorded = is_grad_enabled() and any(x.requires_grad for x in tensors if isinstance(x, Wrapper))
        if not is_recorded or takes_all or _are_alike(tensors, meshes):
            return _with_values(func, args, kwargs, is_recorded)
    if not takes_all:
        takes_all, compared = _alike_or_refused(func, args, flat, meshes)
    if not meshes or len(meshes) == len(tensors) or getattr(func, "__name__", "") in _OF_GRAPHS:
        return args, kwargs
    distributed = [t for t in tensors if isinstance(t, Wrapper)]
    meta = is_any_meta([t._local_tensor for t in distributed])
    device = distributed[0]._spec.device if meta else None
    if not (takes_all or meta or (is_grad_enabled() and any(map(_is_recorded_number, tensors)))):
        return args, kwargs
    written, places, outs = _written(func, args), count(), leaves(kwargs.get("out"))

    def as_replicated(leaf: object) -> Any:
        if not isinstance(leaf, Tensor) or isinstance(leaf, Wrapper):
            return leaf
        if _is_recorded_number(leaf) and leaf is not written:
            return replicated_tensor(leaf if meta else _mean_of_rows(leaf, meshes[0]), meshes[0], device)
        if leaf.numel() == 1:  # without data, torch takes those without dims alone from another device
            return leaf.to("meta") if meta and leaf.dim() and leaf is not written else leaf
        if not takes_all:
            return leaf
        if compared is not None and not any(leaf is out for out in outs):
            _put_down(compared, func, leaf, next(places))
        elif compared is None and isinstance(leaf, Parameter) and not (meta or is_copied):
            compare_parameter(leaf, meshes[0])
        if comparing():
            what = f"{getattr(func, '__name__', func)} with a plain tensor that counts as replicated"
            compare_calls(f"{what}, {tuple(leaf.shape)}, {leaf.dtype}", meshes[0], contents=leaf)
        whole = replicated_tensor(leaf, meshes[0], device)
        return _in_rows(func, whole) if compared is not None and args and leaf is args[0] else whole

    wrapped: tuple[Args, Kwargs] = replace_leaves((args, kwargs), as_replicated)
    return wrapped


def _alike_or_refused(
    func: Function, args: Args, flat: list[Any], meshes: Sequence[Mesh]
) -> tuple[bool, Comparisons | None]:
    """Whether plain tensors count as replicated where no block says so, and where they are compared."""
    refused = _refused(func, args, flat)
    tensors = [leaf for leaf in flat if isinstance(leaf, Tensor)]
    if refused is None:
        if len(meshes) < len(tensors) and is_grad_enabled() and not _is_harmless(func):
            _put_down_factors(func, tensors, meshes)
        return is_grad_enabled() and graph_task_id() != -1, None  # recomputed: as in the forward pass
    if _are_alike(tensors, meshes):
        return True, comparisons_on(meshes[0])
    if _is_in_step():
        return True, None
    raise _mixed(func, refused, meshes)


def _with_values(func: Function, args: Args, kwargs: Kwargs, is_recorded: bool) -> tuple[Args, Kwargs]:
    """The arguments with distributed tensors as plain ones of their values, differentiable if that is recorded.

    Where those are without data, as in a forward pass that is priced, nothing is written: all are without data.
    """
    value = Wrapper.public.full_tensor if is_recorded else partial(plain_value, func)
    meta = is_any_meta([x._local_tensor for x in leaves((args, kwargs)) if isinstance(x, Wrapper)])

    def of(x: Any) -> Any:
        return value(x) if isinstance(x, Wrapper) else x.to("meta") if meta and isinstance(x, Tensor) else x

    with_values: tuple[Args, Kwargs] = replace_leaves((args, kwargs), of)
    return with_values


def _are_alike(tensors: Sequence[Tensor], meshes: Sequence[Mesh]) -> bool:
    """Whether plain tensors beside distributed ones are alike on all ranks, as models on their mesh were told."""
    if not meshes or _COUNTED_AS_REPLICATED.refused or plain_mode(meshes[0]) != "global":
        return False
    return not any(map(_is_own, tensors))


def alike_tensor(func: Function, x: Tensor, mesh: Mesh) -> Any:
    """A plain operand of `func` as a replicated tensor, where plain ones count as that; None where they do not."""
    if _COUNTED_AS_REPLICATED.depth or counts_plain_as_replicated():
        return replicated_tensor(x, mesh)
    if not _are_alike([x], [mesh]):
        return None
    _put_down(comparisons_on(mesh), func, x, 1)
    return replicated_tensor(x, mesh)


def _is_own(x: Tensor) -> bool:
    """Whether a plain tensor may be this rank's own, or cannot be laid out, as sparse ones."""
    if isinstance(x, Wrapper):
        return False
    return x.layout is not torch.strided or _is_part(x) or not is_alike_on_simulated(x)


def _is_part(x: Tensor) -> bool:
    """Whether `to_local` gave a plain tensor; one of more entries is that of which `from_local` took a part."""
    return x.numel() <= _PARTS.get(x.untyped_storage(), -1)


_OWN_DIMS = {
    **{f"conv{transpose}{n}d": n + 1 for n in (1, 2, 3) for transpose in ("", "_transpose")},
    **dict.fromkeys(("linear", "layer_norm", "rms_norm", "batch_norm", "group_norm", "instance_norm"), 1),
    "embedding": 0,
}
"""Functions of layers, with the number of last dims that are no batch in their first operand."""


def _in_rows(func: Function, x: Wrapper) -> Any:
    """A batch that enters a layer by itself, with its rows split as those of the model's inputs; nothing is sent.

    The result is right in any layout: this spares ranks what others compute.
    """
    if x.dim() <= _OWN_DIMS.get(getattr(func, "__name__", ""), x.dim()):
        return x
    return x.redistribute(placements=layout_of_rows(x._spec.layout.mesh).placements)  # type: ignore[arg-type]


def _put_down(compared: Comparisons, func: Function, x: Tensor, i: int) -> None:
    """Put down a plain operand of the user's line for comparison, the `i`th of its call."""
    frame = user_frame()
    name = getattr(func, "__name__", str(func))
    line = ("?", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
    compared.put_down(x, (name, i, line), lambda: f"plain operand {i + 1} of {name} at {Path(line[0]).name}:{line[1]}")


def _put_down_factors(func: Function, tensors: Sequence[Tensor], meshes: Sequence[Mesh]) -> None:
    """Put down plain operands of one element, which count as replicated anywhere."""
    factors = [x for x in tensors if not isinstance(x, Wrapper)] if _are_alike(tensors, meshes) else []
    for i, x in enumerate(factors):
        _put_down(comparisons_on(meshes[0]), func, x, i)


def _is_recorded_number(x: object) -> TypeGuard[Tensor]:
    """Whether `x` is a plain tensor of one element that needs a gradient; the gradient is then plain, too."""
    return isinstance(x, Tensor) and not isinstance(x, Wrapper) and x.numel() == 1 and x.requires_grad


def _written(func: Function, args: Args) -> object:
    """The tensor that the call writes to, which is not wrapped."""
    name = getattr(func, "__name__", "")
    return args[0] if args and name.endswith("_") and not name.endswith("__") else None


def replicated_tensor(x: Tensor, mesh: Mesh, device: torch.device | None = None) -> Any:
    """The plain tensor `x` as a replicated one; the gradient of `x` is plain.

    Given a `device`, it has no data: that of others without data, meta in plans, another on ranks outside the mesh.
    """
    layout, x = replicated(mesh), as_plain(x)
    refuse_other_forms(x, "a plain tensor that counts as replicated")
    shape = tuple(map(int, x.shape))  # in a graph those that it is traced with
    if not x.requires_grad:
        spec = contiguous_spec(layout, shape, x.dtype, x.device if device is None else device)
        return wrap_counting(x, on_all_ranks(x if device is None else x.to("meta"), mesh), spec)
    from_local: Any = Wrapper.public.from_local  # which takes a pure mesh, too
    meta = device == torch.device("meta")
    is_local = (simulated_ranks() is None or are_simulated([x])) and not meta
    local = x if is_local else _Lifted.apply(x, mesh, meta)  # type: ignore[no-untyped-call]
    return from_local(local, mesh, layout.placements, shape=shape)


def _mean_of_rows(x: Tensor, mesh: Mesh) -> Tensor:
    """`x`, with the mean over all rows as its value, if a model gives the program the plain rows of each data rank.

    Its gradient is that of this rank's own number, which is weighted where the rows left the model.
    """
    if mesh not in _MEANS or x.is_leaf or _COUNTED_AS_REPLICATED.depth:
        return x
    terms, share = _MEANS[mesh]
    term = x.detach() * share if share else torch.zeros_like(x)  # the mean of no rows is nan
    from_local: Any = Wrapper.public.from_local
    mean = from_local(term, mesh, terms.placements, shape=term.shape).full_tensor()
    return _WithValue.apply(x, mean)  # type: ignore[no-any-return, no-untyped-call]


class _WithValue(torch.autograd.Function):
    """Tensor -> another value of it; the gradient is passed on."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Lifted(torch.autograd.Function):
    """Plain tensor -> the local tensors of simulated ranks, or one without data; backward: `_Lowered`."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, mesh: Mesh, meta: bool) -> Tensor:
        ctx.mesh, ctx.meta, ctx.device = mesh, meta, x.device
        return x.detach().to("meta") if meta else on_all_ranks(x.detach(), mesh)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Lowered.apply(grad, ctx.mesh, ctx.meta, ctx.device), None, None  # type: ignore[no-untyped-call]


class _Lowered(torch.autograd.Function):
    """Local tensors of simulated ranks, equal on all -> a plain tensor; zeros where there are no data."""

    @staticmethod
    def forward(ctx: Context, local: Tensor, mesh: Mesh, meta: bool, device: torch.device) -> Tensor:
        ctx.mesh, ctx.meta = mesh, meta
        if meta:
            return torch.zeros_like(local, device=device)
        with plain():
            return of_first_rank(local).clone()

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _Lifted.apply(grad, ctx.mesh, ctx.meta), None, None, None  # type: ignore[no-untyped-call]


_COMPARED: WeakValueDictionary[int, Parameter] = WeakValueDictionary()
"""The plain parameters that the ranks have compared, by their ids."""


def compare_parameter(x: Parameter, mesh: Mesh) -> None:
    """Refuse a plain parameter, such as that of a module added later, that ranks first use with other values."""
    if _COMPARED.get(id(x)) is x or is_compiling() or not is_own(x):
        return
    _COMPARED[id(x)] = x
    of_rank = gather_rows([crc32(str((x.shape, x.dtype)).encode()), checksum(x) - 2**63], mesh, is_check=True)
    if len(set(of_rank.values())) > 1:
        raise LayoutError(
            f"a plain parameter of shape {tuple(x.shape)} among distributed tensors counts as replicated, but the "
            "ranks have other values: make it after torch.manual_seed with one seed on all ranks, or lay it out with "
            "distribute_tensor, which sends that of the first rank"
        )


_WRITES = frozenset({"__iadd__", "__isub__", "__imul__", "__itruediv__", "__setitem__"})
"""The names of functions that write to their first argument and do not end with one underscore."""


def _writes_to_plain(func: Function, args: Args, kwargs: Kwargs) -> bool:
    """Whether the call writes distributed values to plain tensors, as averages of weights do that were made before."""
    name = getattr(func, "__name__", "")
    if not args or not (name in _WRITES or (name.endswith("_") and not name.endswith("__"))):
        return False
    written = args[0] if name.startswith("_foreach_") else args[:1]
    if not written or any(type(x) not in PLAIN or isinstance(x, Sequence) for x in written):
        return False
    return any(isinstance(x, Wrapper) for x in tensors_in((args[1:], kwargs)))


_BY_INDICES = ("index_", "gather", "scatter", "take")
"""Names of functions that take indices, where a plain tensor of one element is a position, not a factor."""


def refuse_plain(func: Function, args: Args, kwargs: Kwargs | None) -> None:
    """Refuse plain tensors of several elements: only the user knows whether they are local or global tensors.

    Plain tensors that composite operators and backward passes make are equal on all ranks, and count as replicated.
    """
    refused = _refused(func, args, leaves((args, kwargs)))
    if refused is not None:
        raise _mixed(func, refused)


def _is_harmless(func: Function) -> bool:
    """Whether plain tensors in a call are alike on all ranks by what it is, or by where it is made."""
    if getattr(func, "__name__", "") in _HARMLESS or graph_task_id() != -1:
        return True
    # Functions of torch.masked count elements in plain tensors of their own, known by their module alone
    return asked_by("torch.masked", through=("dshard",))


def _refused(func: Function, args: Args, flat: Sequence[object]) -> Tensor | None:
    """The first plain tensor among the arguments that is refused, if any is."""
    for t in flat:
        if isinstance(t, Tensor) and not isinstance(t, Wrapper) and (t.numel() != 1 or t.dim()):
            name = getattr(func, "__name__", str(func))
            if t.numel() == 1 and not name.startswith(_BY_INDICES):
                continue
            if _is_harmless(func):
                return None
            return None if name.startswith(_ON_LISTS) and _are_apart(args) else t
    return None


def _mixed(func: Function, plain: Tensor, meshes: Sequence[Mesh] = ()) -> MixedError:
    name = getattr(func, "__name__", str(func))
    what = f"{name}: a plain torch.Tensor of shape {tuple(plain.shape)} among distributed tensors"
    by_hand = (
        "wrap it with distribute_tensor(x, mesh, placements), or DTensor.from_local if each rank has a part; or run "
        "this `with dshard.implicit_replication():` if it is the same on all ranks"
    )
    if not meshes or _COUNTED_AS_REPLICATED.refused or plain_mode(meshes[0]) is None:
        why = (
            f"; {by_hand}; beside a parallelized model with whole batches it counts as such; 0-d tensors, and others "
            "of one element, are taken as they are"
        )
    elif plain_mode(meshes[0]) == "per-data-rank":
        why = (
            ", where a model is given the rows of each data rank (inputs='per-data-rank'), so it may be rows or whole: "
            "take dshard.distribute_batch(model, batch), or have plain outputs by parallelize(..., outputs='plain'); "
            + by_hand
        )
    elif plain_mode(meshes[0]) == "both":
        why = (
            ", where models on one mesh are given whole batches and rows of each data rank (inputs=), so it may be "
            f"either: take dshard.distribute_batch(model, batch), or give them alike; {by_hand}"
        )
    elif plain.layout is not torch.strided:
        why = f": it is {str(plain.layout).removeprefix('torch.')}, and distributed ones are strided: take x.to_dense()"
    elif _is_part(plain):
        why = f": it is what to_local gave, one rank's part; {by_hand}"
    else:
        why = (
            ": the simulated ranks have other values of it, and a model with whole batches takes what is alike on all: "
            f"make it before the block, or alike on all ranks; {by_hand}"
        )
    return MixedError(what + why)


def _are_apart(lists: Args) -> bool:
    """Whether no entry of the lists has both plain tensors and distributed ones."""
    rows = zip(*[arg for arg in lists if isinstance(arg, list | tuple)], strict=False)
    kinds = ({isinstance(t, Wrapper) for t in row if isinstance(t, Tensor) and t.dim() > 0} for row in rows)
    return all(len(kind) < 2 for kind in kinds)


_STEP: Any = Optimizer.profile_hook_step(Optimizer.step)
_STEPS = frozenset({_STEP.__code__, AveragedModel.update_parameters.__code__, sparse_.__code__})
"""The code that runs the step of each optimiser, and torch's own code for averages and values of weights."""


def _is_in_step() -> bool:
    """Whether code of `_STEPS` runs: ranks run one program on one state, as in forward passes.

    A closure that the step calls records gradients, and is the user's. The stack tells, so that a step that raised
    leaves nothing behind, and steps without plain state do not pay.
    """
    frame = next((frame for frame in callers() if frame.f_code in _STEPS), None)
    if frame is None or not is_grad_enabled():
        return frame is not None
    args, kwargs = frame.f_locals.get("args", ())[1:], frame.f_locals.get("kwargs", {})
    return not any(map(callable, (*args, *kwargs.values())))
