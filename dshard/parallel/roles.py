"""Roles of parameter dims in a strategy: residual or inner features, contracted or produced by a matmul.

The residual stream is the class with the most parameter dims among those that several matmuls produce, or a matmul and
the input. A class that one matmul produces and another contracts is inner: the heads of an attention, the width of a
feed-forward block. A class that only one matmul has, such as a vocabulary, counts as inner if it is at least as wide as
the residual stream; fewer entries are not worth sharding. A class narrower than the residual stream, between it and
wider inner features, is latent: what attention compresses keys and values to, the rank of an adapter.

Experts are the class that says so in the rule of a layer of experts; features within each of them are inner if a mesh
axis may shard them there.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from enum import Enum
from math import prod

from dshard.parallel.factors import Dims, ModelTrace, TracedDim, Use


class FeatureKind(Enum):
    """The kind of features that a dim has."""

    RESIDUAL = "residual"
    INNER = "inner"
    LATENT = "latent"
    EXPERT = "expert"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Role:
    """The role of one dim of a parameter: its kind, whether a matmul contracts it, its size and number of heads.

    `blocks` is the number of equal parts that are packed along the dim, into which what a matmul makes of it is split.
    """

    kind: FeatureKind
    summed: bool
    size: int
    units: int
    blocks: int = 1


@dataclass(frozen=True, slots=True)
class Output:
    """The output of a module that holds weights: its dims of the batch, of the sequence and of residual features."""

    batch: int | None
    sequence: int | None
    residual: int | None
    shape: tuple[int, ...]
    itemsize: int


@dataclass(frozen=True, slots=True)
class Roles:
    """The roles of all parameters' dims by name, the residual outputs of modules, and the matmuls of modules.

    `products` says for modules with one matmul how it uses its weight, `shared` which of these share their input with
    another. `rows` is the batch size. With `has_sequence` the residual stream has a sequence dim; with `of_inputs` that
    is the second dim of the first input. `heads` is the smallest number of heads of an attention, None without one.
    """

    parameters: dict[str, tuple[Role, ...]]
    outputs: dict[str, Output]
    products: dict[str, Use]
    shared: frozenset[str]
    width: int
    rows: int = 1
    has_sequence: bool = False
    of_inputs: bool = False
    heads: int | None = None

    @property
    def has_experts(self) -> bool:
        """Whether parameters have experts, which the rule of a layer tells."""
        return any(role.kind is FeatureKind.EXPERT for dims in self.parameters.values() for role in dims)


def roles_of(traced: ModelTrace) -> Roles:
    """The roles of parameters, and of the modules that hold them, in a traced forward pass."""
    residual = _residual(traced)
    width = sys.maxsize if residual is None else _size(traced, residual)
    inner = _inner(traced, residual, width)
    latent = _latent(traced, inner, width)
    kinds = dict.fromkeys(inner, FeatureKind.INNER) | dict.fromkeys(latent, FeatureKind.LATENT)
    if residual is not None:
        kinds[residual] = FeatureKind.RESIDUAL
    experts = traced.experts
    kinds |= dict.fromkeys(experts.inner, FeatureKind.INNER) | dict.fromkeys(experts.experts, FeatureKind.EXPERT)
    units = _units(traced)
    summed = {(use.parameter, dim) for use in _main_uses(traced).values() for dim in use.summed}

    def role(name: str, i: int, dim: TracedDim) -> Role:
        c, size = dim
        if c is None:
            return Role(FeatureKind.OTHER, (name, i) in summed, size, 1)
        kind, blocks = kinds.get(c, FeatureKind.OTHER), traced.packed.get(dim, 1)
        return Role(kind, (name, i) in summed, size, min(size, units.get(c, size)), blocks)

    parameters = {
        name: tuple(role(name, i, dim) for i, dim in enumerate(dims)) for name, dims in traced.parameters.items()
    }
    products = _products(traced, parameters)
    uses = Counter(traced.first_inputs.get(module) for module in products)
    shared = frozenset(module for module in products if uses[traced.first_inputs.get(module)] > 1)
    outputs = _outputs(traced, residual, parameters)
    second = traced.inputs[0][1].group if traced.inputs and len(traced.inputs[0]) > 1 else None
    sequences = {traced.outputs[name][out.sequence].group for name, out in outputs.items() if out.sequence}
    of_inputs = second is not None and second in sequences
    heads = min(traced.heads, default=(0, None))[1]
    n_rows = next((dims[0].size for dims in traced.inputs if dims and dims[0].group is not None), 1)
    return Roles(parameters, outputs, products, shared, width, n_rows, bool(sequences), of_inputs, heads)


def _products(traced: ModelTrace, parameters: dict[str, tuple[Role, ...]]) -> dict[str, Use]:
    uses: defaultdict[str, list[Use]] = defaultdict(list)
    for use in traced.uses:
        if use.indices is None and len(parameters[use.parameter]) > 1:
            uses[use.module].append(use)
    return {module: own[0] for module, own in uses.items() if len({use.parameter for use in own}) == 1}


def _residual(traced: ModelTrace) -> int | None:
    """The class of the residual stream: the most frequent of those that several matmuls, look-ups or inputs make."""
    producers = Counter(traced.parameters[use.parameter][i].group for use in traced.uses for i in use.left)
    producers.update({dim.group for dims in traced.inputs for dim in dims})
    counts = Counter(dim.group for dims in traced.parameters.values() for dim in dims if dim.group is not None)
    several = [c for c in counts if producers[c] > 1]
    return max(several, key=lambda c: (counts[c], -c), default=None)


def _size(traced: ModelTrace, c: int) -> int:
    """The size of the widest parameter dim in class `c`."""
    return max((dim.size for dims in traced.parameters.values() for dim in dims if dim.group == c), default=0)


def _is_matrix(dims: Dims) -> bool:
    """Whether a parameter has two or more dims of more than one entry."""
    return sum(dim.group is not None for dim in dims) > 1


def _main_uses(traced: ModelTrace) -> dict[str, Use]:
    """The main use of each parameter of two or more dims: its matmul, or for a tied table its look-up."""
    uses: dict[str, Use] = {}
    for use in traced.uses:
        if not _is_matrix(traced.parameters[use.parameter]):
            continue
        known = uses.setdefault(use.parameter, use)
        if known.indices is not None and use.indices is None and not set(known.summed) & set(use.left):
            uses[use.parameter] = use
    return uses


def _inner(traced: ModelTrace, residual: int | None, width: int) -> set[int]:
    """Classes that matmuls produce and contract, and wide classes of one matmul or of the rows of a look-up table."""
    produced: set[int | None] = set()
    contracted: set[int | None] = set()
    ends: set[int | None] = set()
    batch = _batch(traced)
    for use in traced.uses:
        dims = traced.parameters[use.parameter]
        classes = [dim.group for dim in dims]
        if not _is_matrix(dims):
            continue
        if use.indices is None:
            produced |= {classes[i] for i in use.left}
            contracted |= {classes[i] for i in use.summed}
        elif batch in use.indices:
            ends |= {classes[i] for i in use.summed}
    wide = {c for c in produced | ends if c is not None and _size(traced, c) >= width}
    return ((produced & contracted) | wide) - {None, residual}  # type: ignore[return-value]


def _latent(traced: ModelTrace, inner: set[int], width: int) -> set[int]:
    """Inner classes narrower than the residual stream that a matmul expands to, or compresses from, wider inner ones.

    That matmul is sharded by the wider ones, so that sharding the narrow ones would only have them gathered again. The
    classes of one side, such as heads and their features, are as wide as their product.
    """
    latent: set[int] = set()
    for use in _main_uses(traced).values():
        classes = [dim.group for dim in traced.parameters[use.parameter]]
        sides = [inner & {classes[i] for i in dims} for dims in (use.summed, use.left)]
        sizes = [prod(_size(traced, c) for c in side) for side in sides]
        for side, size in zip(sides, sizes, strict=True):
            if size < min(width, max(sizes)):
                latent |= side
    return latent if width < sys.maxsize else set()


def _batch(traced: ModelTrace) -> int | None:
    """The class of the batch: the class of the first dim of the first input."""
    return traced.inputs[0][0].group if traced.inputs and traced.inputs[0] else None


def _units(traced: ModelTrace) -> dict[int, int]:
    """The number of equal units (heads) of each class: the most into which a view of an activation splits it."""
    full_sizes: defaultdict[int, set[int]] = defaultdict(set)
    for use in _main_uses(traced).values():
        for i in () if use.indices is not None else (*use.summed, *use.left):
            c, size = traced.parameters[use.parameter][i]
            if c is not None:
                full_sizes[c].add(size)
    parts: defaultdict[int, set[int]] = defaultdict(set)
    for dim, is_major in traced.parts:
        c, size = dim
        if c is not None and c in full_sizes and size > 1 and (is_major or size not in full_sizes[c]):
            parts[c].add(size // traced.packed.get(dim, 1))
    return {c: max(sizes) for c, sizes in parts.items()}


def _outputs(traced: ModelTrace, residual: int | None, parameters: dict[str, tuple[Role, ...]]) -> dict[str, Output]:
    """The outputs of modules whose weights produce residual or latent features, in a matmul or a look-up.

    A latent has the rows of the residual stream: so what is made of it has, and what is wide need not be moved.
    """
    batch = _batch(traced)
    narrow = {
        use.module: traced.parameters[use.parameter][i].group
        for use in traced.uses
        for i in use.left
        if parameters[use.parameter][i].kind is FeatureKind.LATENT
    }
    makers = {use.module for use in traced.uses if len(parameters[use.parameter]) > 1}
    makers |= traced.experts.modules
    outputs = {}
    for name, dims in traced.outputs.items():
        classes = [dim.group for dim in dims]
        made = residual if residual in classes else narrow.get(name)
        if name not in makers or made not in classes:
            continue
        features = classes.index(made)
        first = classes.index(batch) if batch in classes else None
        rest = [i for i in range(len(dims)) if i not in (features, first) and classes[i] is not None]
        shape, itemsize = traced.shapes[name]
        own = features if made == residual else None
        outputs[name] = Output(first, rest[0] if rest else None, own, shape, itemsize)
    return outputs
