"""Named strategies, rows of `STRATEGIES`: what each of their mesh axes shards, and so the plan of a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, TypeAlias

from dshard.core.torch_placements import torch_placements
from dshard.errors import StrategyError
from dshard.foreign_names import line_for
from dshard.layout import Layout
from dshard.mesh import Mesh
from dshard.parallel.factors import Use
from dshard.parallel.plan_values import ModelPlan
from dshard.parallel.roles import FeatureKind, Output, Role, Roles
from dshard.placements import Placement, Replicate, Shard
from dshard.placements.chunk import chunk
from dshard.rules.attention_loops import AttentionLoop
from dshard.rules.matmul_loops import Loop, Schedule, Stored
from dshard.validate import suggestion

Weights: TypeAlias = Literal["inner", "residual", "summed", "made", "first"]
"""The dim of a parameter that an axis shards: inner or residual features, contracted or produced by a matmul, or the
first dim of a size above one that no other axis shards."""


@dataclass(frozen=True, slots=True)
class Axis:
    """The use of one mesh axis: what it shards of the batch or sequence, the weights, and the residual stream.

    `attention` is the loop of attention on the axis, None for the cheapest. A parameter that no matmul uses, such as a
    bias or a norm's, is sharded by "made" and by its own kind of features. Parameters of experts are sharded by inner
    features within each expert where they may be, or else by expert, on any axis that shards weights and does not
    gather them; with `experts` by expert, and they are not gathered.
    """

    name: str
    batch: bool = False
    weights: Weights | None = None
    residual: Literal["features", "sequence"] | None = None
    sequence: bool = False
    attention: AttentionLoop | None = None
    experts: bool = False

    def place(self, roles: tuple[Role, ...], rather_not: Collection[int] = ()) -> Placement:
        """The placement of a parameter on this axis: sharded by the first dim that fits, avoiding `rather_not`.

        Each of several parts that are packed along the dim is sharded, but where they are gathered for use.
        """
        dim = self.sharded_dim(roles, rather_not)
        if dim is None:
            return Replicate()
        blocks = 1 if self.weights == "first" else roles[dim].blocks
        return Shard(dim) if blocks == 1 else Shard(dim, blocks=blocks)

    def sharded_dim(self, roles: tuple[Role, ...], rather_not: Collection[int] = ()) -> int | None:
        """The dim of a parameter that this axis shards, None if it shards none."""
        dims = [i for i, role in enumerate(roles) if self._splits(roles, role)]
        experts = [i for i, role in enumerate(roles) if role.kind is FeatureKind.EXPERT]
        if experts and self.weights is not None and not self.gathers(roles):
            dims = (dims if self.weights == "inner" else []) or experts
        return min(dims, key=lambda i: (i in rather_not, i in rather_not and not roles[i].summed, i), default=None)

    def gathers(self, roles: tuple[Role, ...]) -> bool:
        """Whether the axis gathers a parameter for use: not experts, if it is theirs."""
        is_of_experts = any(role.kind is FeatureKind.EXPERT for role in roles)
        return self.weights == "first" and not (self.experts and is_of_experts)

    def _splits(self, roles: tuple[Role, ...], role: Role) -> bool:
        match self.weights:
            case None:
                return False
            case "first":
                return role.size > 1
            case "inner":
                return role.kind is FeatureKind.INNER
            case "residual":
                return role.kind is FeatureKind.RESIDUAL and not _twice(roles, role)
            case "summed":
                return role.summed and role.kind is not FeatureKind.OTHER
            case "made":
                return not role.summed and role.kind is not FeatureKind.OTHER

    def loop(self, roles: tuple[Role, ...], use: Use) -> tuple[Loop, Stored] | None:
        """The loop of a matmul on this axis, and the placement of a sum; None if neither batch nor weight is sharded.

        A sum takes the layout of the module's output, or is replicated; but contracting the columns of a tied table
        leaves it sharded like the rows.
        """
        if self.batch or self.sequence:
            return "m", "R"
        match self.place(roles):
            case Shard(dim) if dim in use.summed:
                return "k", "n" if self.weights == "made" else "R"
            case Shard(_):
                return "n", "R"
            case _:
                return None

    @property
    def inputs(self) -> Placement:
        """The placement, on this axis, of inputs whose first dims are the batch and the sequence."""
        return Shard(0) if self.batch else Shard(1) if self.sequence else Replicate()

    def keep(self, output: Output) -> Placement:
        """The placement, on this axis, of a module's output in the residual stream."""
        dim = None
        if self.batch:
            dim = output.batch
        elif self.residual == "features":
            dim = output.residual
        elif self.residual == "sequence" or self.sequence:
            dim = output.sequence
        return Replicate() if dim is None else Shard(dim)


def _twice(roles: tuple[Role, ...], role: Role) -> bool:
    """Whether the parameter has two dims of residual features and `role` is the one that is not contracted."""
    return not role.summed and any(r.summed and r.kind is FeatureKind.RESIDUAL for r in roles)


DATA = Axis("data", batch=True)
TENSOR = Axis("tensor", weights="inner")
SEQUENCE = Axis("tensor", weights="inner", residual="sequence")
GATHERED = Axis("fsdp", batch=True, weights="first")
EXPERT = Axis("expert", batch=True, weights="first", experts=True)
CONTEXT = Axis("sequence", sequence=True)
HEADS = Axis("heads", sequence=True, attention="h")
FEATURES = Axis("features", weights="residual", residual="features")
ROWS = Axis("rows", batch=True, weights="summed")
COLUMNS = Axis("columns", weights="made", residual="features")

StrategyName: TypeAlias = Literal[
    "auto", "data", "fsdp", "expert", "megatron", "megatron-sp", "context", "ulysses", "atp", "optimus", "tesseract"
]
"""The names below, and that of the cheapest; products of them are text."""

STRATEGIES: dict[str, tuple[Axis, ...]] = {
    "data": (DATA,),
    "fsdp": (GATHERED,),
    "expert": (EXPERT,),
    "megatron": (TENSOR,),
    "megatron-sp": (SEQUENCE,),
    "context": (CONTEXT,),
    "ulysses": (HEADS,),
    "atp": (TENSOR, FEATURES),
    "optimus": (ROWS, COLUMNS),
    "tesseract": (DATA, ROWS, COLUMNS),
}
"""The mesh axes of each strategy, outermost first."""


def axes_of(name: str, mesh: Mesh) -> tuple[Axis, ...]:
    """The use of each axis of `mesh` under the strategy `name`; leading axes that it does not need shard the batch.

    Strategies are joined by " x ": "fsdp x megatron" takes two axes.

    >>> [axis.name for axis in axes_of("optimus", Mesh((2, 2, 2), ("dp", "r", "c")))]
    ['data', 'rows', 'columns']
    """
    axes: tuple[Axis, ...] = ()
    for part in name.split(" x "):
        if part not in STRATEGIES:
            hint = f": write {line}" if (line := line_for(part)) else suggestion(part, STRATEGIES)
            raise StrategyError(
                f"no strategy is called {part!r}{hint}; there are {', '.join(STRATEGIES)} and auto, and products of "
                'them such as "data x megatron"; or give placements by name, {pattern: placements}'
            )
        axes += STRATEGIES[part]
    if len(axes) > mesh.ndim:
        shapes = " x ".join(axis.name for axis in axes)
        raise StrategyError(
            f"the strategy {name!r} needs {len(axes)} mesh axes ({shapes}), but the mesh ({mesh}) has {mesh.ndim}: "
            f"{_nearest(len(axes), mesh)}"
        )
    return (DATA,) * (mesh.ndim - len(axes)) + axes


def _nearest(ndim: int, mesh: Mesh) -> str:
    shape = [1] * (ndim - 1) + [mesh.size]
    while shape[-1] % 2 == 0 and shape[-1] > min(shape[:-1]) * 2:
        i = shape.index(min(shape[:-1]))
        shape[i], shape[-1] = shape[i] * 2, shape[-1] // 2
    return f"make one of the shape ({', '.join(map(str, shape))})"


def fitted_roles(roles: Roles, axes: tuple[Axis, ...], mesh: Mesh) -> Roles:
    """`roles` without inner features fewer than the ranks that would shard them, such as those of low-rank adapters.

    Fewer heads, or groups of a GroupNorm, are refused: ranks would have nothing to do.
    """
    if not roles.has_sequence and any(axis.sequence for axis in axes):
        raise StrategyError(
            "context and ulysses split the sequence of the residual stream, and the modules of this model keep none: "
            "use another strategy, or give placements by name"
        )
    if any(axis.experts for axis in axes) and not roles.has_experts:
        raise StrategyError(
            "expert splits the experts of layers over ranks, and this model has none that are known: use fsdp; or "
            "teach its modules with experts by dshard.parallel.register_experts, or have them call dshard.experts"
        )
    _check_heads(roles, axes, mesh)
    fitting: dict[str, tuple[Role, ...]] = {}
    for name, dims in roles.parameters.items():
        ranks = [_ranks_along(i, dims, axes, mesh) for i in range(len(dims))]
        fitting[name] = tuple(
            replace(role, kind=FeatureKind.OTHER)
            if role.kind is FeatureKind.INNER and role.units == role.size < n
            else role
            for role, n in zip(dims, ranks, strict=True)
        )
        for i, (role, n) in enumerate(zip(fitting[name], ranks, strict=True)):
            if role.kind is FeatureKind.INNER and not role.summed and role.units < n:
                units = "groups" if roles.heads is None else "heads"
                raise StrategyError(
                    f"{name} has {role.units} {units} in dim {i}, split over {n} ranks of the mesh ({mesh}): "
                    f"{n - role.units} would have none; use at most {_legal(role.units, n)} ranks there, and the "
                    "other axes for the batch"
                )
    return replace(roles, parameters=fitting)


def _ranks_along(dim: int, roles: tuple[Role, ...], axes: tuple[Axis, ...], mesh: Mesh) -> int:
    """The number of ranks over which the axes for inner features shard this dim of a parameter."""
    pairs = zip(axes, mesh.shape, strict=True)
    return prod(size for axis, size in pairs if axis.weights in ("inner", "made") and axis.sharded_dim(roles) == dim)


def refined(roles: Roles, name: str, mesh: Mesh, hosts_of: Callable[[Mesh, str], int]) -> tuple[str, Mesh]:
    """The strategy and the mesh with more axes where the number of experts, or of hosts, asks for it.

    An axis with more ranks than there are experts becomes two, of which only the second splits experts, so that each
    of its ranks has some; the first gathers them as it does all parameters: "fsdp x expert". One that spans several
    hosts becomes an axis of hosts and one within them, which both split experts, so that a token may go once to each
    host: "expert x expert". `hosts_of` is the number of hosts that a group along an axis spans.
    """
    totals = {role.size for dims in roles.parameters.values() for role in dims if role.kind is FeatureKind.EXPERT}
    along = iter([own for own, axis in zip(mesh.names, axes_of(name, mesh), strict=True) if axis.experts])
    parts: list[str] = []
    for part in name.split(" x "):
        if STRATEGIES[part] == (EXPERT,):
            axis = next(along)
            n = mesh.shape[mesh.axis(axis)]
            split = max(k for k in range(1, n + 1) if n % k == 0 and all(chunk(total, k, k - 1) for total in totals))
            if 1 < split < n:
                parts.append("fsdp")
                mesh, axis = _as_two(mesh, axis, n // split)
            hosts, within = hosts_of(mesh, axis), mesh.shape[mesh.axis(axis)]
            if 1 < hosts < within and within % hosts == 0:
                finer, inner = _as_two(mesh, axis, hosts)
                if hosts_of(finer, inner) == 1:
                    parts.append(part)
                    mesh = finer
        parts.append(part)
    return " x ".join(parts), mesh


def _as_two(mesh: Mesh, axis: str, outer: int) -> tuple[Mesh, str]:
    """The mesh in which an axis is `outer` groups of ranks, and the name of the axis within them."""
    sizes = {f"{axis}0": outer, f"{axis}1": mesh.shape[mesh.axis(axis)] // outer}
    return mesh.unfolded(axis, sizes), f"{axis}1"


def idle_experts(roles: Roles, axes: tuple[Axis, ...], mesh: Mesh) -> str:
    """What to warn of where experts are fewer than the ranks over which they are split; "" where they are not."""
    for name, dims in roles.parameters.items():
        for i, role in enumerate(dims):
            if role.kind is not FeatureKind.EXPERT:
                continue
            ours = [n for axis, n in zip(axes, mesh.shape, strict=True) if not axis.gathers(dims)]
            split = [axis.sharded_dim(dims) == i for axis in axes if not axis.gathers(dims)]
            ranks = prod(n for n, is_split in zip(ours, split, strict=True) if is_split)
            if ranks > role.size:
                n = _legal(role.size, ranks)
                way_out = f"'fsdp x expert' on a mesh whose last axis has {n} ranks" if n > 1 else "'fsdp'"
                return (
                    f"{name} has {role.size} experts, split over {ranks} ranks of the mesh ({mesh}): "
                    f"{ranks - role.size} have none; use {way_out}"
                )
    return ""


def _check_heads(roles: Roles, axes: tuple[Axis, ...], mesh: Mesh) -> None:
    """Refuse axes that shard attention by heads if there is no attention, or fewer heads than ranks."""
    if not any(axis.attention == "h" for axis in axes):
        return
    if roles.heads is None:
        raise StrategyError(
            "ulysses splits attention by heads, and this model calls no scaled_dot_product_attention, nor products of "
            "[batch, heads, queries, features] in its place: have it call that, or use context"
        )
    pairs = zip(axes, mesh.shape, strict=True)
    ranks = prod(size for axis, size in pairs if axis.attention == "h" or axis.weights in ("inner", "made"))
    if roles.heads < ranks:
        raise StrategyError(
            f"ulysses splits the {roles.heads} heads of attention over {ranks} ranks of the mesh ({mesh}): "
            f"{ranks - roles.heads} would have none; use at most {_legal(roles.heads, ranks)} ranks there, and "
            "'context' on a further axis, which needs no heads"
        )


def _legal(units: int, ranks: int) -> int:
    return max(n for n in range(1, ranks + 1) if ranks % n == 0 and n <= units)


def lay_out(roles: Roles, name: str, axes: Sequence[Axis], mesh: Mesh) -> ModelPlan:
    """The plan in which each mesh axis is used as its entry of `axes` says."""
    parameters = {name: _placed(dims, axes, mesh) for name, dims in roles.parameters.items()}
    outputs = {name: tuple(axis.keep(output) for axis in axes) for name, output in roles.outputs.items()}
    products = {
        module: schedule for module, use in roles.products.items() if (schedule := _schedule(roles, module, use, axes))
    }
    inputs = {"": tuple(axis.inputs if axis.batch or roles.of_inputs else Replicate() for axis in axes)}
    gathered = tuple(own for own, axis in zip(mesh.names, axes, strict=True) if axis.weights == "first")
    attention = tuple(axis.attention for axis in axes) if any(axis.attention for axis in axes) else None
    kept = {name: rest for name, dims in roles.parameters.items() if (rest := _gathered(dims, axes, mesh)) != gathered}
    gathers = ({"": gathered} if gathered else {}) | kept
    return ModelPlan(
        name, mesh, parameters, inputs, outputs, products, roles.shared, attention=attention, gathers=gathers
    )


def _gathered(dims: tuple[Role, ...], axes: Sequence[Axis], mesh: Mesh) -> tuple[str, ...]:
    """The mesh axes that gather a parameter with these dims for use."""
    return tuple(own for own, axis in zip(mesh.names, axes, strict=True) if axis.gathers(dims))


def _placed(dims: tuple[Role, ...], axes: Sequence[Axis], mesh: Mesh) -> tuple[Placement, ...]:
    """The placements of a parameter with these dims.

    An axis that gathers the parameter for use shards another dim than the other axes, if there is one, or else their
    shards of the same dim: so gathering runs along such axes alone.
    """
    gathers = [axis.gathers(dims) for axis in axes]
    used = tuple(Replicate() if last else axis.place(dims) for last, axis in zip(gathers, axes, strict=True))
    if not any(gathers):
        return used
    split = {placement.dim for placement in used if isinstance(placement, Shard)}
    layout = Layout(mesh, used)
    for i, axis in enumerate(axes):
        if gathers[i]:
            layout = layout.replace(i, axis.place(dims, split))
    return torch_placements(layout)


def _schedule(roles: Roles, module: str, use: Use, axes: Sequence[Axis]) -> Schedule | None:
    """The loops of a module's matmul if every axis has one; sums stay partial until the output's layout is applied."""
    loops = [axis.loop(roles.parameters[use.parameter], use) for axis in axes]
    rows = [row for row in loops if row is not None]
    if len(rows) < len(loops):
        return None
    pinned = module in roles.outputs
    return Schedule(
        tuple(loop for loop, _ in rows), tuple("P" if loop == "k" and pinned else stored for loop, stored in rows)
    )
