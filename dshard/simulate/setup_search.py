"""Search over all setups of a model on devices: the fastest that fit, and the front of time and memory."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from dshard.cost import work_seconds
from dshard.errors import ShapeError, StrategyError
from dshard.notebook import Drawn
from dshard.simulate.block import BlockCosts
from dshard.simulate.memory import memory_of
from dshard.simulate.setup import Setup, Sharded
from dshard.simulate.tensor_forms import FORMS, Form, form_of
from dshard.simulate.training_step import Step, dtype_name, simulate_step
from dshard.simulate.transformer import Model
from dshard.tables import human_bytes
from dshard.topology import Topology
from dshard.topology.network import check_topology
from dshard.validate import as_int, as_number, as_tuple, check_callable, check_type

Progress = Callable[[int, int], None]
"""Called with the number of simulated setups, and their total."""

MOST_TENSOR = 64
"""The default for the most ranks of a tensor-parallel group."""


@dataclass(frozen=True, slots=True, repr=False)
class SearchResult(Drawn):
    """The setups that fit, the fastest first, and how many were considered, on a topology.

    `tried` counts the enumerated ones, `fitting` those that fit in `memory`, bytes of each device or None without
    limit; `steps` are the simulated ones: by their operations alone, others cannot be faster than the fastest.
    """

    steps: tuple[Step, ...]
    tried: int
    fitting: int
    topology: Topology
    memory: float | None = None

    def __repr__(self) -> str:
        fastest = f", the fastest {self.steps[0].setup} in {self.steps[0].seconds:.4g} s" if self.steps else ""
        return f"SearchResult({self.fitting} of {self.tried} setups fit{fastest})"

    @property
    def front(self) -> tuple[Step, ...]:
        """The Pareto front: the steps that no other beats in both seconds and bytes, the fastest first."""
        kept: list[Step] = []
        for step in sorted(self.steps, key=lambda s: (s.seconds, s.memory.total)):
            if not kept or step.memory.total < kept[-1].memory.total:
                kept.append(step)
        return tuple(kept)


def search(
    model: Model,
    devices: int,
    topology: Topology,
    batch: int,
    *,
    memory: float | None = None,
    forms: Iterable[str] | None = None,
    dtype: str = "bfloat16",
    itemsize: int = 2,
    keep: int = 20,
    most_tensor: int = MOST_TENSOR,
    runnable: bool = False,
    progress: Progress | None = None,
) -> SearchResult:
    """The fastest `keep` setups of `model` on `devices` devices for a batch of `batch` sequences.

    Setups are simulated in the order of the seconds that their operations alone take, until those are more than the
    slowest one kept. `memory` is in bytes for each device, by default that of the topology's device; with `runnable`,
    only those that `dshard.parallelize` lays out by itself are tried (`Setup.beyond`).

    Raises:
        StrategyError: no setup fits; names the one that needs the least memory.
        TopologyError: the topology has fewer ranks.
        ShapeError: a number or size that cannot be.
    """
    check_type(model, Model, "model", "give a dshard.simulate.Model", ShapeError)
    check_topology(topology)
    dtype = dtype_name(dtype, topology)
    counts = {"devices": devices, "batch": batch, "itemsize": itemsize, "keep": keep, "most_tensor": most_tensor}
    devices, batch, itemsize, keep, most_tensor = (as_int(n, name, ShapeError, least=1) for name, n in counts.items())
    if memory is None:
        memory = topology.device.memory
    else:
        as_number(memory, "memory", ShapeError)
    if progress is not None:
        check_callable(progress, "progress", "give a function of two numbers")
    task = _Task(model, topology, batch, dtype, itemsize)
    candidates = [
        setup
        for setup in setups(model, devices, batch, _forms_named(forms), most_tensor)
        if not (runnable and setup.beyond)
    ]
    if not candidates:
        raise StrategyError(
            f"no setup of {devices} devices takes {model.layers} layers, {model.heads} heads and a batch of {batch}: "
            f"use another number of devices, or a batch that more ranks divide"
        )
    fitting = _fitting(task, candidates, memory)
    return SearchResult(_fastest(task, fitting, keep, progress), len(candidates), len(fitting), topology, memory)


@dataclass(frozen=True, slots=True)
class _Task:
    """A model and a batch to train it on, whatever the setup."""

    model: Model
    topology: Topology
    batch: int
    dtype: str
    itemsize: int

    def nbytes(self, setup: Setup) -> int:
        """Bytes of the busiest rank."""
        costs = BlockCosts(self.model, setup, self.topology, self.dtype, self.itemsize)
        return memory_of(costs, self.batch // setup.microbatches).total

    def at_least(self, setup: Setup) -> float:
        """A lower bound on the seconds of a step of this setup: its operations, and the bubble of its stages."""
        model, batch = self.model, self.batch
        slots = (setup.microbatches + setup.stages - 1) / setup.microbatches
        flops = 3.0 * (2.0 * batch * model.sequence * model.block_parameters + model.core_flops(batch)) * model.layers
        again = 4 / 3 if setup.recompute else 1.0
        return work_seconds(flops * again * slots / setup.devices, 0.0, self.topology, self.dtype)

    def simulate(self, setup: Setup) -> Step:
        """The step of this setup, planned without a search."""
        return simulate_step(
            self.model, setup, self.topology, self.batch, dtype=self.dtype, itemsize=self.itemsize, exact=False
        )


def _forms_named(names: Iterable[str] | None) -> list[Form]:
    if names is None:
        return list(FORMS.values())
    return [form_of(name) for name in as_tuple(names, "forms", "give names of forms in a list", StrategyError)]


def _fitting(task: _Task, candidates: Sequence[Setup], memory: float | None) -> list[Setup]:
    """The setups whose busiest rank holds at most `memory` bytes."""
    sizes = [task.nbytes(setup) for setup in candidates]
    fitting = [setup for setup, nbytes in zip(candidates, sizes, strict=True) if memory is None or nbytes <= memory]
    if not fitting:
        least = min(sizes)
        raise StrategyError(
            f"nothing fits in {human_bytes(memory or 0)} on {candidates[0].devices} devices: the least is "
            f"{least} bytes ({human_bytes(least)}) on each, with {candidates[sizes.index(least)]}; use more devices, "
            "or a smaller batch"
        )
    return fitting


def _fastest(task: _Task, fitting: Sequence[Setup], keep: int, progress: Progress | None) -> tuple[Step, ...]:
    """The simulated steps, the fastest first, until no other setup can be among the `keep` fastest."""
    queue = sorted(fitting, key=task.at_least)
    steps: list[Step] = []
    for i, setup in enumerate(queue):
        if progress is not None:
            progress(i, len(queue))
        if len(steps) >= keep and task.at_least(setup) > steps[keep - 1].seconds:
            break
        insort(steps, task.simulate(setup), key=lambda step: (step.seconds, step.memory.total, str(step.setup)))
    return tuple(steps)


def setups(model: Model, devices: int, batch: int, forms: Sequence[Form], most_tensor: int) -> Iterator[Setup]:
    """All setups that the sizes of the model and the batch allow."""
    for tensor in _divisors(devices):
        if tensor > most_tensor:
            break
        for stages in _divisors(devices // tensor):
            if model.layers % stages:
                continue
            data = devices // tensor // stages
            for form in forms:
                for shape in form.shapes(tensor):
                    yield from _kinds(model, batch, form, shape, data, stages)


def _kinds(model: Model, batch: int, form: Form, shape: tuple[int, ...], data: int, stages: int) -> Iterator[Setup]:
    """The setups of a form of this shape; sequences are sharded only if the rows do not divide among ranks.

    Otherwise more replicas send less: attention then moves nothing, and the rest is the same.
    """
    shares: tuple[Sharded, ...] = ("none", "optimizer", "all") if data > 1 else ("none",)
    for microbatches in _microbatches(batch, data, stages):
        for recompute in (False, True):
            for sharded in shares:
                setup = Setup(form, shape, data, stages, microbatches, sharded, recompute)
                chunks = setup.chunks_of_sequence
                rows_suffice = chunks > 1 and batch // microbatches % (data * chunks) == 0
                if not rows_suffice and not setup.problem(model, batch):
                    yield setup


def _microbatches(batch: int, data: int, stages: int) -> list[int]:
    """Powers of two from one to a sequence for each replica; with stages, no fewer microbatches than stages."""
    most = batch // data
    counts = [m for m in (2**i for i in range(most.bit_length())) if m <= most and batch % (m * data) == 0]
    return [m for m in counts if m >= stages] or counts[-1:]


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
