"""Limits of a search in a user's words: pinned layouts, and kinds of dims that a mesh axis may not shard."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod
from typing import Any, TypeAlias

from dshard.errors import DShardError, LayoutError, MeshError, StrategyError
from dshard.layout import Layout, layout_of, parse_layout
from dshard.mesh import Mesh
from dshard.parallel.factors import FactorClasses
from dshard.parallel.plan_values import Pins
from dshard.planning.step_graph import GraphCall, StepGraph, Value
from dshard.planning.step_limits import WORDS, DimWords, StepLimits, StoredLimit
from dshard.validate import as_tuple, check_one_of, check_type, suggestion

Words: TypeAlias = Mapping[str, frozenset[str]]
"""What each mesh axis may not shard."""
FORBID = 'give words by the name of a mesh axis, as in {"y": ["sequence", "experts"]}'
PINS = 'give layouts by the name of a parameter or a module, as in {"head.weight": "x:S(0) y:R"}'


def check_pins(pins: object) -> None:
    """Refuse pins that are no mapping by names."""
    check_type(pins, Mapping, "pins", PINS, StrategyError)
    for name in pins:  # type: ignore[attr-defined]  # a mapping
        check_type(name, str, "pins", PINS, StrategyError)


def checked_words(forbid: object) -> dict[str, frozenset[str]]:
    """What each axis may not shard, of one word or several for each."""
    check_type(forbid, Mapping, "forbid", FORBID, StrategyError)
    words = dict[str, frozenset[str]]()
    for axis, own in forbid.items():  # type: ignore[attr-defined]  # a mapping
        check_type(axis, str, "forbid", FORBID, StrategyError)
        words[axis] = frozenset([own] if isinstance(own, str) else as_tuple(own, f"forbid: {axis}", FORBID))
        for word in sorted(words[axis], key=str):
            check_one_of(word, WORDS, f"forbid: what {axis!r} may not shard", StrategyError)
    return words


def limits_of(graph: StepGraph, mesh: Mesh, pins: Pins, forbid: Words, names: Mapping[str, str]) -> StepLimits:
    """The limits of plans on `mesh`; `names` has the first name of each parameter by all of its names.

    Raises:
        LayoutError: a name of nothing in the step, or a layout that its tensor cannot have.
        MeshError: no such axis.
        StrategyError: a pinned parameter that is sharded on an axis that may not, or what the model returns.
    """
    unknown = [axis for axis in forbid if axis not in mesh.names]
    if unknown:
        raise MeshError(
            f"forbid: the mesh ({mesh}) has no axis {unknown[0]!r}: use {', '.join(mesh.names)}"
            + suggestion(unknown[0], mesh.names)
        )
    axes = {mesh.axis(axis): words for axis, words in forbid.items()}
    limits = StepLimits(forbid=axes, words=dim_words(graph) if axes else {})
    return with_pins(limits, graph, mesh, pins, names)


def with_pins(limits: StepLimits, graph: StepGraph, mesh: Mesh, pins: Pins, names: Mapping[str, str]) -> StepLimits:
    """The limits, and these pins."""
    known = {value.name: value for value in graph.parameters()}
    of_modules = {module: call for module, call in results_of(graph).items() if module}
    stored, read = dict[str, StoredLimit](), dict[int, Layout]()
    for pattern, pin in pins.items():
        own = parameters_like(pattern, names, modules=False)
        modules = [module for module in of_modules if fnmatchcase(module, pattern)]
        if not own and not modules:
            raise unknown_name("pins", pattern, [*names, *of_modules])
        for name in own:
            if name not in known:
                raise LayoutError(f"pins: no call of the step reads {name!r}: leave it out, it is replicated")
            value = known[name]
            layout = _pinned(name, pin, mesh, value, graph)
            readers = ", ".join(dict.fromkeys(graph.calls[use.call].name for use in value.uses))
            stored[name] = StoredLimit(layout)
            if any(axis in layout.axes_of(dim) for dim in layout.sharded_dims() for axis in limits.stored(name).whole):
                raise StrategyError(
                    f"pins: {name!r}, which {readers} reads, cannot lie [{layout}], as forbid has an axis on which "
                    "parameters are whole: leave out one of the two"
                )
        for module in () if own else modules:
            value = of_modules[module].results[0]
            if not value.uses:
                raise StrategyError(
                    f"pins: {module!r} makes what the model returns: give its placements as outputs= of parallelize"
                )
            read[value.number] = _pinned(module, pin, mesh, value, graph)
    return limits.also(stored, read)


def results_of(graph: StepGraph) -> dict[str, GraphCall]:
    """The last call within each module, whose result the module returns."""
    last: dict[str, GraphCall] = {}
    for call in graph.calls:
        names = call.module.split(".") if call.module and call.name != "copy" else []
        last |= {".".join(names[: n + 1]): call for n in range(len(names))}
    return last


def _pinned(name: str, pin: object, mesh: Mesh, value: Value, graph: StepGraph) -> Layout:
    """The layout of a pin, if a tensor can be laid out so."""
    try:
        own: Any = pin.placements if isinstance(pin, Layout) else pin
        layout = parse_layout(own, mesh) if isinstance(own, str) else layout_of(mesh, own, len(value.shape))
    except DShardError as error:
        raise type(error)(f"pins: {name!r}: {error}") from None
    shards = {dim: prod([mesh.shape[axis] for axis in layout.axes_of(dim)]) for dim in layout.sharded_dims()}
    if layout.partial_axes() or any(n > (*value.shape, *[0] * (dim + 1))[dim] for dim, n in shards.items()):
        shape = "x".join(map(str, value.shape)) or "a number"
        readers = ", ".join(dict.fromkeys([graph.calls[use.call].name for use in value.uses]))
        raise LayoutError(
            f"pins: {name!r}, {shape}, which {readers} reads, cannot lie [{layout}]: it is never partial, and no dim "
            "has more shards than entries; pin another layout"
        )
    return layout


def parameters_like(pattern: str, names: Mapping[str, str], modules: bool = True) -> list[str]:
    """The first names of parameters that match a pattern, as in `fnmatch`; with `modules` those in ones that do."""
    patterns = (pattern, f"{pattern}.*") if modules else (pattern,)
    return [*dict.fromkeys(own for name, own in names.items() if any(fnmatchcase(name, each) for each in patterns))]


def unknown_name(what: str, pattern: str, known: Iterable[str]) -> LayoutError:
    """The error of a pattern that matches nothing."""
    known = [*known]
    return LayoutError(
        f"{what}: {pattern!r} is no parameter and no module of the step: give a name or a pattern as in fnmatch, of "
        f"{', '.join(known[:3])}, ...{suggestion(pattern, known)}"
    )


# -- meshes


def refined_axes(shape: Sequence[int], finer: Sequence[int]) -> tuple[tuple[int, ...], ...] | None:
    """The axes of a finer mesh that each axis of a mesh becomes; None where it is not a finer one.

    >>> refined_axes((8, 2), (2, 4, 2))
    ((0, 1), (2,))
    """
    axes, at = list[tuple[int, ...]](), 0
    for size in shape:
        begin, n = at, 1
        while at < len(finer) and (n < size or at == begin):
            n *= finer[at]
            at += 1
        if n != size:
            return None
        axes.append(tuple(range(begin, at)))
    return tuple(axes) if at == len(finer) else None


def on_finer(mesh: Mesh, pins: Pins, forbid: Words, finer: Mesh) -> tuple[Pins, Words]:
    """Pins and forbidden words on a mesh of which some axes are unfolded: each of the new ones has those of the old."""
    axes = refined_axes(mesh.shape, finer.shape)
    assert axes is not None
    texts = {}
    for name, pin in pins.items():
        layout = parse_layout(pin, mesh) if isinstance(pin, str) else pin
        placements = layout.placements if isinstance(layout, Layout) else tuple(layout)
        texts[name] = [p for own, p in zip(axes, placements, strict=True) for _ in own]
    return texts, {finer.names[i]: words for axis, words in forbid.items() for i in axes[mesh.axis(axis)]}


# -- what dims count


def dim_words(graph: StepGraph) -> dict[int, DimWords]:
    """What the dims of each value count, by its number; dims that the rules of calls join count the same.

    Dims of parameters count features, or experts where the rule of a layer says so; the first dim of an input counts
    the batch, and further ones that no parameter has are the sequence. Of a dim of several factors it is the major one.
    """
    factors = FactorClasses(graph.values)
    for call in graph.calls:
        ends = ([value.number for value in values] for values in (call.operands, call.results))
        factors.join(call.rule, call.module, *ends)
    classes = factors.classes
    nodes = {value.number: factors.nodes(value.number) for value in graph.values}
    words: dict[int, str] = {}

    def name(word: str, kind: str, dims: slice = slice(None)) -> None:
        for value in graph.values:
            for own in nodes[value.number][dims] if value.kind == kind else ():
                if own:
                    words.setdefault(classes.find(own[0]), word)

    name("batch", "input", slice(1))
    words |= {classes.find(node): "experts" for node in factors.experts.experts}
    name("features", "parameter")
    name("sequence", "input")
    return {
        number: tuple([words.get(classes.find(own[0])) if own else None for own in dims])
        for number, dims in nodes.items()
    }
