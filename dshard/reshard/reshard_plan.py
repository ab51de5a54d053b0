"""Plans from a layout on one mesh to a layout on another: made once, then printed, priced and run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

from dshard.caches import cached
from dshard.errors import MeshError
from dshard.interned import Interned
from dshard.layout import Layout, Shape
from dshard.notebook import Tabled
from dshard.placements import Partial, Placement, Replicate, Shard
from dshard.redistribute import Plan, plan
from dshard.redistribute.step import numel
from dshard.reshard.chains import (
    FORMS,
    Chain,
    Draft,
    Form,
    HostNetwork,
    Resource,
    Task,
    drafts,
    forms_of,
    host_network_of,
    reduced_axes,
    tasks,
)
from dshard.reshard.order import Choice, Use, balanced, chains_seconds, in_order, scheduled, uses_of
from dshard.tables import human_bytes
from dshard.topology import Topology

WIDE = 4
"""The least bytes of an element that is summed along a chain: narrower ones would be rounded too often."""


@dataclass(frozen=True, repr=False, eq=False)
class ReshardPlan(Interned, Tabled):
    """The steps that reshard a tensor of global `shape` from `src` to `dst`, on another mesh.

    `first`, if any, runs on the source mesh, then `chains` send from mesh to mesh, then `last`, if any, runs on the
    destination mesh. A rank of both meshes keeps the elements that it needs. In the model of the paper (`makespan`, and
    its lower `bound`, in seconds) links within hosts and messages take no time; `seconds` counts them, and `first`.
    """

    src: Layout
    dst: Layout
    shape: Shape
    itemsize: int
    first: Plan | None
    chains: tuple[Chain, ...]
    last: Plan | None
    network: HostNetwork
    makespan: float
    bound: float
    seconds: float

    @property
    def chains_src(self) -> Layout:
        """The layout on the source mesh from which the chains send."""
        return self.src if self.first is None else self.first.dst

    @property
    def chains_dst(self) -> Layout:
        """The layout on the destination mesh to which the chains send."""
        return self.dst if self.last is None else self.last.src

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of both meshes, which take part."""
        return tuple(sorted({*self.src.mesh.ranks, *self.dst.mesh.ranks}))

    @property
    def chains_seconds(self) -> float:
        """Seconds of the chains alone, without `first` and `last`."""
        return chains_seconds(self.chains, self.itemsize, self.network)

    @property
    def ratio(self) -> float:
        """The makespan over its lower bound."""
        return self.makespan / self.bound if self.bound else 1.0

    def received(self, rank: int) -> int:
        """The elements that a rank receives in the chains."""
        return sum(len(chain.span) for chain in self.chains for _, receiver in chain.hops if receiver == rank)

    def crossing(self) -> dict[tuple[int, int], int]:
        """Bytes sent from host to host, for each (sender, receiver) pair of hosts that has any."""
        nbytes: Counter[tuple[int, int]] = Counter()
        for chain in self.chains:
            for sender, receiver in chain.hops:
                if self.network.crosses(sender, receiver):
                    nbytes[self.network.host(sender), self.network.host(receiver)] += len(chain.span) * self.itemsize
        return dict(nbytes)

    def steps(self, most: int = 32) -> list[str]:
        """The plan in words, a line for each step; of the chains, only the first ones."""
        around = ([] if plan is None else plan.words() for plan in (self.first, self.last))
        first, last = (list(map("  ".join, words)) for words in around)
        more = len(self.chains) - most
        shown = [_line(chain, self.itemsize) for chain in self.chains[:most]]
        return [*first, *shown, *([f"and {more:,} chains more"] if more > 0 else []), *last]

    def __str__(self) -> str:
        src, dst = (f"{layout} on ({layout.mesh})" for layout in (self.src, self.dst))
        lines = [f"{src}  ->  {dst}   ({self.seconds * 1e6:.1f} us)"]
        lines += [f"  {i}. {line}" for i, line in enumerate(self.steps(), 1)]
        lines.append(f"  makespan {self.makespan * 1e6:.1f} us, {self.ratio:.2f} of the lower bound")
        return "\n".join(lines)


def _line(chain: Chain, itemsize: int) -> str:
    ranks = ">".join(map(str, chain.ranks))
    return f"{chain.form:16}  [{chain.region_text}]  {len(chain.span) * itemsize} B  {ranks}"


def plan_reshard(
    src: Layout, dst: Layout, shape: Sequence[int], itemsize: int, topology: Topology, *, seed: int = 0
) -> ReshardPlan:
    """The plan from `src` to `dst` for a tensor of global `shape` with elements of `itemsize` bytes.

    Each unit task takes the cheapest of its forms, unless one form for all is cheaper; `dshard.reshard.order` chooses
    senders and order, the same for the same seed. A partial sum is reduced along the chains, or on the source mesh
    first, whichever is cheaper.

    >>> from dshard.mesh import Mesh
    >>> topology = Topology.preset("cpu", nodes=4, ranks=2)
    >>> src = Layout(Mesh((2, 2)), (Shard(0), Replicate()))
    >>> dst = Layout(Mesh((2, 2), ranks=(4, 5, 6, 7)), (Replicate(), Replicate()))
    >>> chains = plan_reshard(src, dst, (1024, 1024), 4, topology)
    >>> chains.ratio, sum(chains.crossing().values()) // 2**20  # MiB, once for each host
    (1.0, 8)
    """
    return _plan(src, dst, tuple(shape), itemsize, topology, seed)


@cached("reshard plans", 4096)
def _plan(src: Layout, dst: Layout, shape: Shape, itemsize: int, topology: Topology, seed: int) -> ReshardPlan:
    _check(src, dst, shape, topology)
    network, landed = host_network_of(topology), _completed(dst, Replicate())
    last = None if landed == dst else plan(landed, dst, shape, itemsize, topology)
    plans: list[ReshardPlan] = []
    for first in _first_plans(src, shape, itemsize, topology):
        empty, unit_tasks = _without_chains(src, dst, shape, itemsize, network, first, last)
        candidates = [_scheduled(empty, mix, seed) for mix in _mixes(unit_tasks, itemsize, network)]
        plans.append(min(candidates, key=lambda plan: (plan.seconds, len(plan.chains))))
    return min(plans, key=lambda plan: plan.seconds)


def _without_chains(
    src: Layout,
    dst: Layout,
    shape: Shape,
    itemsize: int,
    network: HostNetwork,
    first: Plan | None = None,
    last: Plan | None = None,
) -> tuple[ReshardPlan, tuple[Task, ...]]:
    """A plan without chains, with its lower bound, and the tasks for its chains."""
    empty = ReshardPlan(src, dst, shape, itemsize, first, (), last, network, 0.0, 0.0, 0.0)
    unit_tasks = tasks(empty.chains_src, empty.chains_dst, shape)
    return replace(empty, bound=lower_bound(unit_tasks, itemsize, network)), unit_tasks


def _scheduled(empty: ReshardPlan, chosen: Sequence[Draft], seed: int | None) -> ReshardPlan:
    """The plan with the chains of these drafts; without a seed, in the order of the tasks."""
    chains, makespan = scheduled(chosen, empty.itemsize, empty.network, empty.bound, seed)
    before, after = (0.0 if plan is None else plan.seconds for plan in (empty.first, empty.last))
    seconds = before + chains_seconds(chains, empty.itemsize, empty.network) + after
    return replace(empty, chains=chains, makespan=makespan, seconds=seconds)


def _check(src: Layout, dst: Layout, shape: Shape, topology: Topology) -> None:
    if src.mesh.device_type != dst.mesh.device_type:
        raise MeshError(
            f"cannot reshard from the mesh ({src.mesh}) on {src.mesh.device_type} to the mesh ({dst.mesh}) on "
            f"{dst.mesh.device_type}: move the local tensors to one type of device first"
        )
    src.check(shape)
    dst.check(shape)
    for mesh in (src.mesh, dst.mesh):
        topology.link(mesh, mesh.names)  # refuses ranks that it has not


def _first_plans(src: Layout, shape: Shape, itemsize: int, topology: Topology) -> Iterator[Plan | None]:
    """Plans to reduce partial sums on the source mesh first; None leaves them to the chains.

    Chains are of ranges: dims that are sharded in blocks are redistributed first.
    """
    if not reduced_axes(src):
        yield plan(src, src.unblocked(), shape, itemsize, topology) if src.blocks else None
        return
    ops = {p.reduce_op for p in src.placements if isinstance(p, Partial)}
    if ops == {"sum"} and itemsize >= WIDE and not src.blocks:
        yield None
    choices: list[Placement] = [Replicate(), *(Shard(dim) for dim, size in enumerate(shape) if size > 1)]
    for target in dict.fromkeys(_completed(src, choice) for choice in choices):
        yield plan(src, target, shape, itemsize, topology)


def _completed(layout: Layout, placement: Placement) -> Layout:
    """The layout in ranges with `placement` in place of each Partial."""
    layout = layout.unblocked()
    for axis in layout.partial_axes():
        layout = layout.replace(axis, placement)
    return layout


def _mixes(unit_tasks: tuple[Task, ...], itemsize: int, network: HostNetwork) -> list[list[Draft]]:
    """Mixtures of forms: the cheapest form for each task by itself, and each form for all of them."""
    options = [forms_of(task, network) for task in unit_tasks]
    cheapest = []
    for number, (task, forms) in enumerate(zip(unit_tasks, options, strict=True)):
        priced = [(_seconds_alone(task, form, itemsize, network, number), i, form) for i, form in enumerate(forms)]
        cheapest.append(min(priced)[2])
    mixes = [tuple(cheapest)] + [
        tuple(form if form in forms else own for forms, own in zip(options, cheapest, strict=True)) for form in FORMS
    ]
    return [
        [
            draft
            for number, (task, form) in enumerate(zip(unit_tasks, mix, strict=True))
            for draft in drafts(task, form, network, number)
        ]
        for mix in dict.fromkeys(mixes)
    ]


def _seconds_alone(task: Task, form: Form, itemsize: int, network: HostNetwork, number: int) -> float:
    """Seconds of a task in one form if it has all links to itself."""
    chains, _ = scheduled(drafts(task, form, network, number), itemsize, network, 0.0, None)
    return chains_seconds(chains, itemsize, network)


def needy_hosts(task: Task, network: HostNetwork) -> tuple[int, ...]:
    """The hosts that must receive a task's slice: they have receivers, and lack some term of it."""
    have = [{network.host(rank) for rank in replicas} for replicas in task.holders]
    return tuple(host for host, _ in network.by_host(task.receivers) if not all(host in hosts for hosts in have))


def lower_bound(tasks: Sequence[Task], itemsize: int, network: HostNetwork) -> float:
    """Seconds that the busiest cards need, however the tasks are sent (latency and links within hosts apart).

    Each host that needs a slice receives it once. Each slice is sent once, by some host that holds it: so the cards of
    any set of hosts send the slices that only these hosts hold.
    """
    rate = network.bandwidth * network.cards
    receives: defaultdict[int, float] = defaultdict(float)
    sends: defaultdict[frozenset[int], float] = defaultdict(float)
    for task in tasks:
        needy = needy_hosts(task, network)
        for host in needy:
            receives[host] += numel(task.region) * itemsize
        if needy:
            hosts = frozenset(network.host(rank) for replicas in task.holders for rank in replicas)
            sends[hosts] += numel(task.region) * itemsize
    sets = {*sends, frozenset().union(*sends)} if sends else set()
    sent = [sum(amount for hosts, amount in sends.items() if hosts <= some) / len(some) for some in sets]
    return max([*receives.values(), *sent], default=0.0) / rate


@dataclass(frozen=True, slots=True)
class ChainRow:
    """One chain as a row: `slice` is the region, with the flattened elements if it is a piece; times in seconds."""

    start: float
    seconds: float
    nbytes: int
    chunks: int
    form: str
    slice: str
    ranks: tuple[int, ...]
    terms: int


def chain_rows(plan: ReshardPlan) -> list[ChainRow]:
    """One row for each chain of a plan."""
    rows = []
    for chain in plan.chains:
        piece = "" if len(chain.span) == numel(chain.region) else f" {chain.span.start}:{chain.span.stop}"
        nbytes, cut = len(chain.span) * plan.itemsize, f"[{chain.region_text}]{piece}"
        rows.append(
            ChainRow(chain.start, chain.seconds, nbytes, chain.chunks, chain.form, cut, chain.ranks, chain.terms)
        )
    return rows


def baselines_of(plan: ReshardPlan, topology: Topology) -> dict[str, float]:
    """The makespans of published strategies for the reshard of `plan`; none if a reduction is partial."""
    if plan.src.partial_axes() or plan.dst.partial_axes():
        return {}
    unit_tasks = (plan.src, plan.dst, plan.shape, plan.itemsize, topology)
    return {baseline: baseline_seconds(baseline, *unit_tasks) for baseline in BASELINES}


def summary_lines(plan: ReshardPlan, topology: Topology) -> list[str]:
    """Lines of text on the steps within one mesh, the bytes between hosts, and the seconds of all."""
    around = [(moved, where) for moved, where in ((plan.first, "first"), (plan.last, "last")) if moved is not None]
    return [
        *(f"{where}, on one mesh: {moved.src} -> {moved.dst}" for moved, where in around),
        *(f"host {a} -> host {b}: {human_bytes(nbytes)}" for (a, b), nbytes in sorted(plan.crossing().items())),
        f"makespan {plan.makespan * 1e6:.1f} us, {plan.ratio:.2f} of the lower bound; "
        f"{plan.seconds * 1e6:.1f} us with messages and links within hosts",
        *(f"{name}: makespan {seconds * 1e6:.1f} us" for name, seconds in baselines_of(plan, topology).items()),
    ]


def data_of(plan: ReshardPlan, topology: Topology) -> dict[str, Any]:
    """A reshard plan as JSON values."""
    crossing = [{"from": a, "to": b, "nbytes": nbytes} for (a, b), nbytes in sorted(plan.crossing().items())]
    return {
        "src": str(plan.src),
        "dst": str(plan.dst),
        "seconds": plan.seconds,
        "makespan": plan.makespan,
        "bound": plan.bound,
        "ratio": plan.ratio,
        "steps": plan.steps(),
        "hosts": crossing,
        "baselines": baselines_of(plan, topology),
        "chains": [asdict(row) for row in chain_rows(plan)],
    }


Baseline: TypeAlias = Literal["send/recv", "local all-gather", "naive broadcast", "balanced broadcast"]
BASELINES: tuple[Baseline, ...] = get_args(Baseline)


def baseline_seconds(
    baseline: Baseline, src: Layout, dst: Layout, shape: Sequence[int], itemsize: int, topology: Topology
) -> float:
    """The makespan of a published strategy, links within hosts and messages taking no time.

    "send/recv" sends each receiver its own copy, "local all-gather" each host one copy, from the sender with the least
    to send (sections 3.1 and 5.1.2); a slice that several hosts need is sent as by "send/recv", as in the authors'
    implementation. For both, messages are assumed never to wait. Both broadcasts send the slices one by one in the
    order of the source's parts: "naive" from the first replica, "balanced" from the sender with the least to send
    (section 3.2).
    """
    network, unit_tasks = host_network_of(topology), tasks(src, dst, shape)
    candidates = [draft for task in unit_tasks for draft in drafts(task, _form(baseline, task, network), network, 0)]
    uses = uses_of(candidates, itemsize, network)
    if baseline in ("send/recv", "local all-gather"):
        return _busiest(uses, balanced(uses))
    choices = balanced(uses) if baseline == "balanced broadcast" else [(job, 0) for job in range(len(uses))]
    return in_order(uses, choices).makespan


def _form(baseline: Baseline, task: Task, network: HostNetwork) -> Form:
    if baseline == "local all-gather" and len(network.by_host(task.receivers)) == 1:
        return "local_all_gather"
    return "broadcast" if baseline.endswith("broadcast") else "send"


def _busiest(uses: Sequence[Sequence[Use]], choices: Sequence[Choice]) -> float:
    load: defaultdict[Resource, float] = defaultdict(float)
    for job, head in choices:
        for resource, seconds in uses[job][head].items():
            load[resource] += seconds
    return max(load.values(), default=0.0)
