"""Roles of parameters in a strategy: dims of the residual stream and inner ones, summed over or made by a matmul.

The residual stream is the class that most dims of parameters belong to, of those that several matmuls make. A class
that some product makes and another sums over is inner: the heads of an attention, the width of a feed-forward block. A
class at an open end, such as a vocabulary, counts as inner where it is at least as wide as the residual stream; fewer
entries are not worth splitting.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from dshard.parallel.factors import Nodes, Traced, Use


class Kind(Enum):
    """The kind of features that a dim has."""

    RESIDUAL = "residual"
    INNER = "inner"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Role:
    """The role of one dim of a parameter: its kind, whether a matmul sums over it, the number of its heads."""

    kind: Kind
    summed: bool
    size: int
    units: int


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
    """The roles of all parameters' dims by name, what modules with residual outputs return, and of modules with one
    product how it uses its weight; which of these
    share what they are given with another. Modules in the order of the forward pass, cut
    into `blocks` after each that adds to the residual stream."""

    parameters: dict[str, tuple[Role, ...]]
    outputs: dict[str, Output]
    products: dict[str, Use]
    shared: frozenset[str]
    width: int
    blocks: tuple[tuple[str, ...], ...]


def roles_of(found: Traced) -> Roles:
    """The roles of parameters, and of the modules that hold them, in a traced forward pass."""
    residual = _residual(found)
    width = sys.maxsize if residual is None else _width(found, residual)
    inner = _inner(found, residual, width)
    units = _units(found)
    summed = {(use.parameter, dim) for use in _main_uses(found).values() for dim in use.summed}

    def role(name: str, i: int, nodes: Nodes) -> Role:
        c = found.class_of(nodes)
        kind = Kind.RESIDUAL if c is not None and c == residual else Kind.INNER if c in inner else Kind.OTHER
        size = found.classes.size[nodes[0]] if nodes else 1
        return Role(kind, (name, i) in summed, size, min(size, units.get(c, size)) if c is not None else 1)

    parameters = {
        name: tuple(role(name, i, nodes) for i, nodes in enumerate(dims)) for name, dims in found.parameters.items()
    }
    products = _products(found, parameters)
    given = Counter(found.given.get(module) for module in products)
    shared = frozenset(module for module in products if given[found.given.get(module)] > 1)
    outputs = _outputs(found, residual, parameters)
    return Roles(parameters, outputs, products, shared, width, _blocks(found, outputs))


def _blocks(found: Traced, outputs: Mapping[str, Output]) -> tuple[tuple[str, ...], ...]:
    blocks: list[list[str]] = [[]]
    for module in found.order:
        blocks[-1].append(module)
        if module in outputs:
            blocks.append([])
    return tuple(tuple(block) for block in blocks if block)


def _products(found: Traced, parameters: dict[str, tuple[Role, ...]]) -> dict[str, Use]:
    uses: defaultdict[str, list[Use]] = defaultdict(list)
    for use in found.uses:
        if use.indices is None and len(parameters[use.parameter]) > 1:
            uses[use.module].append(use)
    return {module: found[0] for module, found in uses.items() if len({use.parameter for use in found}) == 1}


def _residual(found: Traced) -> int | None:
    """The class of the residual stream: that of most dims among those that several matmuls or look-ups make."""
    made = Counter(found.class_of(found.parameters[use.parameter][i]) for use in found.uses for i in use.left)
    counts = found.counts()
    several = [c for c in counts if made[c] > 1]
    return max(several, key=lambda c: (counts[c], -c), default=None)


def _width(found: Traced, residual: int) -> int:
    sizes = [
        found.classes.size[d[0]] for dims in found.parameters.values() for d in dims if found.class_of(d) == residual
    ]
    return max(sizes, default=0)


def _main_uses(found: Traced) -> dict[str, Use]:
    """The main use of each parameter of two or more dims: its matmul, but for a tied table its look-up."""
    uses: dict[str, Use] = {}
    for use in found.uses:
        if sum(bool(nodes) for nodes in found.parameters[use.parameter]) < 2:
            continue
        known = uses.setdefault(use.parameter, use)
        if known.indices is not None and use.indices is None and not set(known.summed) & set(use.left):
            uses[use.parameter] = use
    return uses


def _inner(found: Traced, residual: int | None, width: int) -> set[int]:
    """Classes that matmuls make and sum over, and wide ones at an open end: made, or of rows that are looked up."""
    made: set[int | None] = set()
    summed: set[int | None] = set()
    ends: set[int | None] = set()
    batch = _batch(found)
    for use in found.uses:
        dims = found.parameters[use.parameter]
        classes = [found.class_of(nodes) for nodes in dims]
        if sum(bool(nodes) for nodes in dims) < 2:
            continue
        if use.indices is None:
            made |= {classes[i] for i in use.left}
            summed |= {classes[i] for i in use.summed}
        elif batch in {found.classes.find(n) for n in use.indices}:
            ends |= {classes[i] for i in use.summed}
    wide = {c for c in made | ends if c is not None and _size(found, c) >= width}
    return ((made & summed) | wide) - {None, residual}  # type: ignore[return-value]


def _batch(found: Traced) -> int | None:
    """The class of the batch: that of the first dim of the first input."""
    return found.class_of(found.inputs[0][0]) if found.inputs and found.inputs[0] else None


def _size(found: Traced, c: int) -> int:
    return max(found.classes.size[d[0]] for dims in found.parameters.values() for d in dims if found.class_of(d) == c)


def _units(found: Traced) -> dict[int, int]:
    """The number of equal units (heads) of each class: the most that a view of an activation splits it into."""
    whole: defaultdict[int, set[int]] = defaultdict(set)
    for use in _main_uses(found).values():
        for i in () if use.indices is not None else (*use.summed, *use.left):
            nodes = found.parameters[use.parameter][i]
            if nodes:
                whole[found.classes.find(nodes[0])].add(found.classes.size[nodes[0]])
    parts: defaultdict[int, set[int]] = defaultdict(set)
    for node in range(len(found.classes.size)):
        c = found.classes.find(node)
        if c in whole and found.classes.size[node] not in whole[c] and found.classes.size[node] > 1:
            parts[c].add(found.classes.size[node])
    return {c: max(sizes) for c, sizes in parts.items()}


def _outputs(found: Traced, residual: int | None, parameters: dict[str, tuple[Role, ...]]) -> dict[str, Output]:
    """The outputs of modules whose weights, in a matmul or a look-up, give features of the residual stream."""
    batch = _batch(found)
    makers = {use.module for use in found.uses if len(parameters[use.parameter]) > 1}
    outputs = {}
    for name, dims in found.outputs.items():
        classes = [found.class_of(nodes) for nodes in dims]
        if name not in makers or residual not in classes:
            continue
        features = classes.index(residual)
        first = classes.index(batch) if batch in classes else None
        rest = [i for i in range(len(dims)) if i not in (features, first) and classes[i] is not None]
        shape, itemsize = found.shapes[name]
        outputs[name] = Output(first, rest[0] if rest else None, features, shape, itemsize)
    return outputs
