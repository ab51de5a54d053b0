"""The values sent between stages: a dataflow by names."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dshard.errors import ScheduleError
from dshard.pipeline.actions import Edge
from dshard.validate import as_int, as_tuple, check_type

Ports = tuple[Sequence[str], Sequence[str]]
"""The names of a stage's inputs, and of its outputs."""


def edges_of(stages: Sequence[Ports], batch: Collection[str]) -> tuple[Edge, ...]:
    """The edges of activations: a stage gets each input from the last earlier stage with an output of that name.

    Other inputs are values of the `batch`, which every rank has: nothing is sent for them.

    >>> edges_of([(["x"], ["x", "skip"]), (["x"], ["x"]), (["x", "skip"], ["x"])], batch=["x"])
    (Edge(value='x', src=0, dst=1), Edge(value='skip', src=0, dst=2), Edge(value='x', src=1, dst=2))
    """
    batch = names_of(batch, "batch")
    givers: dict[str, int] = {}
    edges: list[Edge] = []
    for stage, ports in enumerate(as_tuple(stages, "stages", "give the names of each", ScheduleError)):
        if len(ports) != 2 or isinstance(ports, str):
            raise ScheduleError(f"stage {stage}: {ports!r} is no pair: give the names it takes, and those it gives")
        takes, gives = (
            names_of(names, f"what stage {stage} {verb}") for names, verb in zip(ports, _VERBS, strict=True)
        )
        for names, verb in (takes, "takes"), (gives, "gives"):
            if len(set(names)) < len(names):
                raise ScheduleError(f"stage {stage} {verb} {', '.join(names)}: name each value once")
        for name in takes:
            if name in givers:
                edges.append(Edge(name, givers[name], stage))
            elif name not in batch:
                raise ScheduleError(
                    f"stage {stage} takes {name!r}, which neither an earlier stage gives ({_listed(givers)}) "
                    f"nor the batch has ({_listed(batch)}): name it in `gives` of an earlier stage, or in the batch"
                )
        givers.update(dict.fromkeys(gives, stage))
    return tuple(sorted(edges, key=lambda edge: (edge.src, edge.dst, edge.value)))


_VERBS = ("takes", "gives")


def names_of(names: Collection[str], what: str) -> tuple[str, ...]:
    """Check names of values and return them as a tuple; a single string is refused."""
    checked = as_tuple(names, what, "give names in a tuple, such as ('x',)", ScheduleError)
    for name in checked:
        check_type(name, str, what, "give names as text, such as ('x',)", ScheduleError)
    return checked


def chain(n_stages: int) -> tuple[Edge, ...]:
    """The edges of one value that each stage sends to the next.

    >>> chain(3)
    (Edge(value='x', src=0, dst=1), Edge(value='x', src=1, dst=2))
    """
    n_stages = as_int(n_stages, "n_stages", ScheduleError, least=1)
    return tuple(Edge("x", stage, stage + 1) for stage in range(n_stages - 1))


def _listed(names: Collection[str]) -> str:
    return ", ".join(names) or "nothing"
