"""torch.compile: the results of eager and of one device, no graph break, and no graph used where others are chosen."""

from __future__ import annotations

import copy
import pickle
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from helpers.default_cases import one_in
from helpers.finite_numbers import finite
from helpers.transformer_blocks import BLOCKS, LAYOUTS, TOKENS, WIDTH, lay_out
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch._inductor.compile_fx import compile_fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

import dshard
from dshard import (
    CompileError,
    DTensor,
    Mesh,
    Replicate,
    Shard,
    Topology,
    distribute_tensor,
    explain,
    init_device_mesh,
    manual_seed,
    matmul,
    trace,
    use_strategy,
    use_topology,
)
from dshard.comm import runtime_of
from dshard.comm.process_groups import this_world
from dshard.comm.runtime import Runtime
from dshard.compile import metadata
from dshard.compile.metadata import compile_metadata
from dshard.core.context import planning_context
from dshard.testing import RankPool, rank_pool
from dshard.topology import Layer
from dshard.torch_dtensor import IS_TORCHS

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not IS_TORCHS, reason="torch.compile of DTensors needs torch 2.12"),
]
GRID = Mesh((2, 2), ("x", "y"))
R = Replicate()


@pytest.fixture(name="ranks")
def patient_ranks(ranks: RankPool) -> Iterator[RankPool]:
    """Compiling takes seconds, and each rank compiles."""
    before, ranks.timeout = ranks.timeout, 400.0
    yield ranks
    ranks.timeout = before


@cache
def device_mesh(mesh: Mesh) -> Any:
    return init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.names)


def tensor(seed: int, shape: tuple[int, ...], *placements: Any, grad: bool = True) -> Any:
    torch._dynamo.reset()
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    laid = distribute_tensor(values, device_mesh(GRID), placements, src_data_rank=None)
    return laid.requires_grad_() if grad else laid


def gradients(out: Any, tensors: list[Any]) -> list[Tensor]:
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    if isinstance(out, DTensor):
        weights = distribute_tensor(weights, out.device_mesh, out.layout.cotangent().placements, src_data_rank=None)
    found = torch.autograd.grad((out * weights).sum(), tensors)
    return [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in found]


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


# -- blocks


def compiled_block(name: str, layout: str, backend: str, batch: int = 4) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    laid = LAYOUTS[layout]
    mesh = device_mesh(laid.mesh)
    torch.manual_seed(0)
    single = BLOCKS[name]().double()
    model = lay_out(copy.deepcopy(single), mesh, laid)
    values = torch.randn(batch, TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    x = distribute_tensor(values.detach(), mesh, laid.inputs, src_data_rank=None).requires_grad_()
    wanted = single(values)
    wanted_grads = gradients(wanted, [values, *single.parameters()])
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    with use_strategy(matmul=laid.matmul) if laid.matmul else nullcontext():
        eager = model(x)
        for _ in range(2):
            out = compiled(x)

            assert out.layout == eager.layout
            close(out.full_tensor(), eager.full_tensor())
            close(out.full_tensor(), wanted)
            for grad, other in zip(gradients(out, [x, *model.parameters()]), wanted_grads, strict=True):
                close(grad, other)
        assert counter.frame_count == 1
        assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "layout"), [("gpt", "megatron with data"), ("llama", "atp")])
def test_blocks_compiled_are_as_on_one_device(ranks: RankPool, name: str, layout: str) -> None:
    ranks.run(compiled_block, name, layout, "aot_eager")


@pytest.mark.thorough
def test_uneven_batches_compile(ranks: RankPool) -> None:
    ranks.run(compiled_block, "gpt", "megatron with data", "aot_eager", 3)


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", BLOCKS)
def test_all_blocks_compiled_are_as_on_one_device(name: str, layout: str, backend: str) -> None:
    pool = rank_pool(LAYOUTS[layout].mesh.size)
    before, pool.timeout = pool.timeout, 900.0
    try:
        pool.run(compiled_block, name, layout, backend)
    finally:
        pool.timeout = before


def loss_of_tokens(table: Any, scale: Any, tokens: Any, targets: Any) -> Any:
    """A table split over its rows, a norm of split vectors, and a loss over split classes."""
    x = F.embedding(tokens, table)
    if isinstance(x, DTensor):
        x = x.redistribute(placements=[Shard(0), Shard(1)])
    logits = F.rms_norm(x, (x.shape[-1],), scale)
    return F.cross_entropy(logits, targets, label_smoothing=0.1)


def numbers(n: int, below: int) -> Any:
    values = torch.randint(below, (n,), generator=torch.Generator().manual_seed(n))
    return distribute_tensor(values, device_mesh(GRID), [Shard(0), R], src_data_rank=None)


def tables_norms_and_losses() -> list[str]:
    table, scale = tensor(0, (11, 2048), R, Shard(0)), tensor(1, (2048,), R, Shard(0))
    tokens, targets = numbers(12, 11), numbers(13, 2048)[:12].redistribute(placements=[Shard(0), R])
    compiled = torch.compile(loss_of_tokens, backend="aot_eager", fullgraph=True)
    found, eager = compiled(table, scale, tokens, targets), loss_of_tokens(table, scale, tokens, targets)
    whole = [t.full_tensor().detach().requires_grad_() for t in (table, scale)]
    wanted = loss_of_tokens(*whole, tokens.full_tensor(), targets.full_tensor())
    assert found.layout == eager.layout
    close(found.full_tensor(), wanted)
    close(gradients(found, [table, scale]), gradients(wanted, whole))
    with pytest.raises(RuntimeError, match="out of bounds for dimension 0 with size 11"):
        compiled(table, scale, tokens + 11, targets)
    with trace() as seen:
        loss_of_tokens(table, scale, tokens, targets)
    return [event.collective for event in seen.events]


@pytest.mark.thorough
def test_split_tables_norms_and_classes(ranks: RankPool) -> None:
    told = ranks.run(tables_norms_and_losses)[0]
    assert told.count("all_reduce") > 3  # of split rows and classes, that is: nothing was gathered first


# -- what is compiled anew, and what is not


def product(x: Any, w: Any) -> Any:
    return torch.relu(x @ w)


def slow_axis(rates: tuple[float, float]) -> Topology:
    """Four ranks, of which pairs are joined by links of the first of these rates, and ranks of a pair by the second."""
    return Topology("pairs", (Layer("pair", None, rates[0], 1e-6), Layer("rank", 2, rates[1], 1e-6)))


def flipped_topology() -> None:
    x, w = tensor(0, (64, 64), Shard(0), Shard(1)), tensor(1, (64, 64), Shard(0), R)
    fast_inside, fast_outside = slow_axis((1e6, 1e12)), slow_axis((1e12, 1e6))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(product, backend=counter, fullgraph=True)
    layouts = []
    for topology, compilations in ((fast_inside, 1), (fast_outside, 2), (fast_inside, 2), (fast_outside, 2)):
        with use_topology(topology):
            out, eager = compiled(x, w), product(x, w)

            assert out.layout == eager.layout
            close(out.full_tensor(), eager.full_tensor())
            close(gradients(out, [x, w]), gradients(eager, [x, w]))
            assert counter.frame_count == compilations
            layouts.append(out.layout)
    assert layouts[0] != layouts[1]


@pytest.mark.thorough
def test_a_topology_that_flips_the_choice_compiles_anew(ranks: RankPool) -> None:
    ranks.run(flipped_topology)


def changed_strategy() -> None:
    x, w = tensor(0, (8, 8), Shard(0), R), tensor(1, (8, 8), R, R)
    counter = CompileCounter()
    compiled = torch.compile(product, backend=counter, fullgraph=True)
    seen = set()
    for strategy, compilations in (("column", 1), ("row", 2), ("column", 2), ("row", 2)):
        with use_strategy(matmul=strategy):
            out = compiled(x, w)

            assert out.layout == product(x, w).layout
            assert counter.frame_count == compilations
            seen.add(out.layout)
    assert len(seen) == 2


@pytest.mark.thorough
def test_a_strategy_in_use_compiles_anew_where_it_changes(ranks: RankPool) -> None:
    ranks.run(changed_strategy)


def local_tensors_under_settings() -> None:
    """No distributed tensor comes in from outside, whose guards would tell."""
    mesh, local = device_mesh(GRID), torch.ones(4, 8)

    def made(local: Tensor) -> Any:
        x = DTensor.from_local(local, mesh, [Shard(0), R], shape=(8, 8))
        return x @ dshard.ones(8, 8, device_mesh=mesh)

    counter = CompileCounter()
    compiled = torch.compile(made, backend=counter, fullgraph=True)
    for strategy, compilations in (("column", 1), ("row", 2), ("column", 2)):
        with use_strategy(matmul=strategy):
            assert compiled(local).layout == made(local).layout
            assert counter.frame_count == compilations
    close(compiled(local).full_tensor(), torch.full((8, 8), 8.0))
    close(compiled(local).to_local(), made(local).to_local())


@pytest.mark.thorough
def test_tensors_made_inside_are_guarded_too(ranks: RankPool) -> None:
    ranks.run(local_tensors_under_settings)


def other_sizes(sizes: tuple[int, ...], backend: str) -> None:
    w = tensor(1, (8, 12), R, Shard(1))
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(product, backend=counter, fullgraph=True)
    for n in sizes:
        x = distribute_tensor(torch.randn(n, 8, dtype=torch.float64), device_mesh(GRID), [Shard(0), R]).requires_grad_()
        out, eager = compiled(x, w), product(x, w)
        assert out.layout == eager.layout
        close(out.full_tensor(), eager.full_tensor())
        close(gradients(out, [x, w]), gradients(eager, [x, w]))
    assert counter.frame_count == len(set(sizes))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("sizes", "backend"), [((5, 1), "eager"), ((8, 5, 3, 8, 5, 1), "aot_eager")], ids=["eager", "aot_eager"]
)
def test_each_size_has_its_graph(ranks: RankPool, sizes: tuple[int, ...], backend: str) -> None:
    ranks.run(other_sizes, sizes, backend)


NUMBERED: dict[str, Callable[[Any, Any, float], Any]] = {
    "scaled": lambda x, w, s: (x @ w) * s + x[:, :3] / s,
    "added": lambda x, w, s: torch.add(x @ w, x[:, :3], alpha=s),
    "clamped": lambda x, w, s: torch.where(x > s, s, x.clamp(min=-s)),
    "power": lambda x, w, s: (x.abs() + 1) ** s,
    "norm": lambda x, w, s: x.norm(p=1 + s, dim=0),
    "attended": lambda x, w, s: F.scaled_dot_product_attention(x[None], x[None], x[None], scale=s),
}
"""Functions with a number as an argument, whose value rules of some do not ask for, and those of others do."""


def other_numbers(name: str) -> int:
    f = NUMBERED[name]
    x, w = tensor(0, (7, 8), Shard(0), Shard(1)), tensor(1, (8, 3), R, Shard(1))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(f, backend=counter, fullgraph=True)
    for s in (0.5, 0.25, 0.75):
        out, wanted = compiled(x, w, s), f(x.full_tensor(), w.full_tensor(), s)
        close(out.full_tensor(), wanted)
        close(gradients(out, [x])[0], gradients(f(x, w, s), [x])[0])
    return int(counter.frame_count)


@pytest.mark.thorough
def test_a_number_that_changes_is_an_input_of_the_graph(ranks: RankPool) -> None:
    assert max(ranks.run(other_numbers, "scaled")) <= 2  # of the first number, and of any


@pytest.mark.thorough
@pytest.mark.parametrize("name", NUMBERED)
def test_numbers_that_change_are_those_of_eager(ranks: RankPool, name: str) -> None:
    ranks.run(other_numbers, name)


def described_elsewhere() -> list[str]:
    x = tensor(0, (8, 8), Shard(0), R)
    known, guarded = compile_metadata(x._spec, True, True), copy.deepcopy(x._spec)
    assert copy.deepcopy(known) is known
    assert pickle.loads(pickle.dumps(known)) is known
    with use_topology(slow_axis((1e6, 1e6))):
        other = compile_metadata(x._spec, True, True)
        assert pickle.loads(pickle.dumps(other)) is other
        assert other == known
        assert not x._spec._check_equals(guarded, skip_shapes=True)
        assert other.settings is planning_context()
    assert x._spec._check_equals(guarded, skip_shapes=True)
    assert not tensor(0, (8, 8), R, R)._spec._check_equals(guarded, skip_shapes=True)
    runtime = runtime_of(GRID)
    assert runtime is not None
    groups = runtime.device_mesh.get_all_groups()  # of the first mesh of this shape that was made
    assert runtime.group_names()[:2] == tuple(group.group_name for group in groups)
    sizes, grads = tensor(0, (8, 16), *x.placements), tensor(0, (8, 8), *x.placements, grad=not x.requires_grad)
    digests = [known.digest(), other.digest(), *(y._stable_hash_for_caching() for y in (sizes, grads))]
    with patch.object(Runtime, "group_names", return_value=("elsewhere",)):  # as in a process that made others before
        digests.append(known.digest())
    with patch.object(metadata, "library_digest", return_value="another"):
        return [*digests, known.digest()]


def test_graphs_kept_on_disk_are_of_one_rank_one_topology_its_groups_sizes_and_code(ranks: RankPool) -> None:
    names = [name for names in ranks.run(described_elsewhere) for name in names]
    assert len(set(names)) == 24


# -- what is inside a region


def inside(x: Any, w: Any) -> Any:
    mesh = x.device_mesh
    y = x.redistribute(mesh, [R, Shard(1)], async_op=True) * 2
    y = matmul(y, w, strategy="summa", out_placements=[Shard(0), Shard(1)])
    y = y.redistribute(placements=y.placements)
    local = y.to_local() + 1
    return DTensor.from_local(local, mesh, [Shard(0), Shard(1)], shape=(5, 6), stride=(6, 1)).cos()


def region(backend: str) -> None:
    x, w = tensor(0, (5, 7), Shard(0), R), tensor(1, (7, 6), R, Shard(0))
    out = torch.compile(inside, backend=backend, fullgraph=True)(x, w)
    wanted = (2 * x.full_tensor() @ w.full_tensor() + 1).cos()
    assert out.layout == inside(x, w).layout
    close(out.full_tensor(), wanted)
    close(gradients(out, [x, w]), gradients(wanted, [x, w]))


@pytest.mark.parametrize("backend", one_in(3, ["aot_eager", "eager", "inductor"]))
def test_redistributions_and_strategies_inside(ranks: RankPool, backend: str) -> None:
    ranks.run(region, backend)


def products_in_panels(strategy: Any) -> None:
    x, w = tensor(0, (6, 9), Shard(0), Shard(1)), tensor(1, (9, 8), Shard(0), Shard(1))
    with use_strategy(matmul=strategy, panels=2):
        out = torch.compile(product, backend="aot_eager", fullgraph=True)(x, w)
        assert out.layout == product(x, w).layout
        close(out.full_tensor(), product(x, w).full_tensor())
        close(gradients(out, [x, w]), gradients(product(x, w), [x, w]))


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["cannon", "summa"])
def test_products_in_panels_and_around_rings(ranks: RankPool, strategy: str) -> None:
    ranks.run(products_in_panels, strategy)


def refusals() -> list[str]:
    x = tensor(0, (8, 8), Shard(0), R)
    mesh, plain = device_mesh(GRID), torch.ones(8, 8)

    def topology_inside(x: Any) -> Any:
        with use_strategy(matmul="column"):
            return x @ x

    found = []
    for f, argument in (
        (lambda a: DTensor.from_local(a, mesh, [Shard(0), R], run_check=True), plain),
        (lambda a: distribute_tensor(a, mesh, [Shard(0), R]), plain),
        (lambda a: dshard.randperm(8, device_mesh=mesh), plain),
        (topology_inside, x),
    ):
        with pytest.raises(torch._dynamo.exc.TorchDynamoException) as caught:
            torch.compile(f, backend="eager", fullgraph=True)(argument)
        found.append(str(caught.value))
    # without fullgraph the region is left there, and entered again by what it calls
    close(torch.compile(topology_inside, backend="aot_eager")(x).full_tensor(), topology_inside(x).full_tensor())
    return found


def test_what_a_graph_cannot_hold_is_refused(ranks: RankPool) -> None:
    shapes, whole, order, settings = ranks.run(refusals)[0]
    assert "pass the global shape, shape=(...)" in shapes
    assert "pass src_data_rank=None" in whole
    assert "would draw the same each time; call it outside" in order
    assert "CompileError" in settings


# -- collectives


def received(node: Any) -> tuple[str, int] | None:
    """The collective that a node of a graph is, on two ranks, and the bytes that this one receives in it."""
    if node.op != "call_function" or not str(node.target).startswith("_c10d_functional"):
        return None
    name, x = node.target._schema.name.split("::")[1], node.meta["val"]
    match name:
        case "all_gather_into_tensor":
            return name, x.nbytes // 2
        case "all_reduce":
            return name, x.nbytes
        case "all_to_all_single":
            group = dist.distributed_c10d._resolve_process_group(node.args[3])
            return name, x.nbytes - node.args[1][dist.get_rank(group)] * x.itemsize
        case _:
            assert name == "wait_tensor"
            return None


# what gloo has of its own: terms are exchanged, and reduced where they are wanted
FUNCTIONAL = {
    "all_gather": "all_gather_into_tensor",
    "all_reduce": "all_reduce",
    "reduce_scatter": "all_to_all_single",
    "all_to_all": "all_to_all_single",
}


Sent = Counter[tuple[str, int]]


def traced_by(f: Callable[[], Any]) -> tuple[Any, Sent]:
    """What `f` returns, and the collectives outside of graphs that it runs."""
    with trace() as seen:
        out = f()
    return out, Counter((FUNCTIONAL[event.collective], event.nbytes) for event in seen.events)


def keeping(found: dict[str, Sent]) -> Any:
    """A backend that puts the collectives of graphs into `found`."""

    def keep(name: str, graph: Any, inputs: Any) -> Any:
        found[name] = Counter(filter(None, map(received, graph.graph.nodes)))
        return make_boxed_func(graph.forward)

    def partition(graph: Any, inputs: Any, **options: Any) -> Any:
        keep("joint", graph, inputs)
        return min_cut_rematerialization_partition(graph, inputs, **options)

    compilers = {f"{short}_compiler": partial(keep, name) for short, name in (("fw", "forward"), ("bw", "backward"))}
    return aot_autograd(**compilers, partition_fn=partition)


def collectives_of_graphs() -> tuple[int, int]:
    """The bytes that this rank receives in the forward graph, and those planned; the collectives are those of eager."""
    x, w = tensor(0, (8, 16), Shard(0), R), tensor(1, (16, 8), Shard(0), Shard(1))
    ones = distribute_tensor(torch.ones(8, dtype=torch.float64), device_mesh(GRID), [Shard(0), R])
    found: dict[str, Sent] = {}

    def forward(x: Any, w: Any) -> Any:
        y = matmul(x, w, strategy="summa", out_placements=[Shard(0), Shard(1)])
        return y.redistribute(placements=[Shard(1), R]).exp().sum(0).redistribute(placements=[Shard(0), R])

    compiled = torch.compile(forward, backend=keeping(found), fullgraph=True)
    compiled(x, w).backward(ones)
    out, there = traced_by(lambda: forward(x, w))
    _, back = traced_by(lambda: out.backward(ones))
    out, there_outside = traced_by(lambda: compiled(x, w))
    _, back_outside = traced_by(lambda: out.backward(ones))
    # the gradient of x leaves the graph partial along y; the hook of the leaf, which is in no graph, completes it
    assert not there_outside
    assert back_outside == Counter([("all_reduce", x.to_local().nbytes)])
    again = Counter([("all_gather_into_tensor", w.to_local().nbytes)])  # by eager: graphs keep what they gathered
    assert found["joint"] + back_outside == there + back - again
    assert found["forward"] == there
    assert found["backward"] + back_outside == back - again
    assert found["backward"]
    planned = sum(operator.chosen.bytes_moved for operator in explain(forward, x, w).operators)
    return sum(nbytes * n for (_, nbytes), n in found["forward"].items()), planned


def test_collectives_are_functional_and_as_planned(ranks: RankPool) -> None:
    """The same collectives as in eager, of the same bytes on each rank; plans say what the busiest rank receives."""
    received_there, planned = zip(*ranks.run(collectives_of_graphs), strict=True)
    assert max(received_there) == max(planned) == min(planned) > 0


def norm_before_columns() -> None:
    x, columns = tensor(0, (8, 16), Shard(0), R), tensor(1, (32, 16), R, Shard(0))
    weight, bias = tensor(2, (16,), R, R), tensor(3, (16,), R, R)
    found: dict[str, Sent] = {}

    def forward(x: Any) -> Any:
        return F.linear(F.layer_norm(x, (16,), weight, bias), columns)

    def step(run: Any) -> Any:
        out = run(x)
        return out.backward(torch.ones_like(out))

    compiled = torch.compile(forward, backend=keeping(found), fullgraph=True)
    step(compiled)
    _, eager = traced_by(lambda: step(forward))
    _, outside = traced_by(lambda: step(compiled))
    assert found["joint"] + outside == eager
    assert found["backward"][("all_reduce", x.to_local().nbytes)] == 1  # of columns: before the norm, and not after it


def test_the_gradient_of_a_norm_is_reduced_once_as_in_eager(ranks: RankPool) -> None:
    """Neither for the input nor for the parameters of the norm is more sent than for its result."""
    ranks.run(norm_before_columns)


# -- ranks without data

Gather = Callable[[Any], Any]


def convolved(x: Any, a: Any, b: Any, gather: Gather) -> Any:
    return F.conv1d(x, gather(a)) + F.conv1d(x.cos(), gather(b)) * 2


def distances(x: Any, a: Any, b: Any, gather: Gather) -> Any:
    return torch.cdist(x, gather(a)[:3]) * torch.cdist(x.sin(), gather(b)[:3])


def transformed(x: Any, a: Any, b: Any, gather: Gather) -> Any:
    return (
        torch.fft.rfft(x).abs() * torch.linalg.svdvals(x + gather(a))[..., :1, None] + torch.fft.rfft(gather(b)).abs()
    )


def multiplied(x: Any, a: Any, b: Any, gather: Gather) -> Any:
    return (x.flatten(1) @ gather(a).flatten(1).t()).relu() @ gather(b).flatten(1)


def attended(x: Any, a: Any, b: Any, gather: Gather) -> Any:
    return F.scaled_dot_product_attention(x[:, None], gather(a)[:3][:, None], gather(b)[:3][:, None])


def scanned(x: Any, a: Any, b: Any, gather: Gather) -> Any:
    return x.cumsum(0) * gather(a)[:3].cumsum(0) + x.roll(1, 0) * gather(b)


def unused(x: Any, a: Any, b: Any, gather: Gather) -> Any:
    gather(a)
    return x * gather(b).sum()


def classified(x: Any, a: Any, b: Any, gather: Gather) -> Any:
    """A loss, whose sum and number of targets are both zero on a rank without rows."""
    targets = x[:, 0].detach().argmin(1) % 3
    return F.cross_entropy(x.flatten(1) @ gather(a).flatten(1).t(), targets) * gather(b)


def collectives_where_a_rank_has_nothing(function: Any) -> list[list[str]]:
    """Those of the forward and the backward graph of this rank; of the rows of all operands the last rank has none."""
    torch._dynamo.reset()
    mesh, found = init_device_mesh("cpu", (4,), mesh_dim_names=("x",)), []

    def keep(graph: Any, inputs: Any) -> Any:
        names = [str(node.target).split(".")[1] for node in graph.graph.nodes if "_c10d" in str(node.target)]
        found.append([name for name in names if name != "wait_tensor"])
        return make_boxed_func(graph.forward)

    single = [
        torch.randn(n, 2, 5, generator=torch.Generator().manual_seed(i), dtype=torch.float64, requires_grad=True)
        for i, n in enumerate((3, 3, 3) if function is not multiplied else (3, 4, 4))
    ]
    laid = [distribute_tensor(x.detach(), mesh, [Shard(0)], src_data_rank=None).requires_grad_() for x in single]
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    out, wanted = compiled(*laid, lambda x: x.redistribute(placements=[R])), function(*single, lambda x: x)
    close(out.full_tensor(), wanted)
    used = [i for i in range(3) if function is not unused or i != 1]
    close(gradients(out, [laid[i] for i in used]), gradients(wanted, [single[i] for i in used]))
    return found


@pytest.mark.parametrize(
    "function",
    [
        convolved,
        classified,
        *(
            pytest.param(each, marks=pytest.mark.thorough)
            for each in (distances, transformed, multiplied, attended, scanned, unused)
        ),
    ],
)
def test_graphs_have_the_same_collectives_on_ranks_without_data(ranks: RankPool, function: Any) -> None:
    first, *others = ranks.run(collectives_where_a_rank_has_nothing, function)
    assert sum(map(len, first)) > 1
    assert all(other == first for other in others)


EXCHANGES: dict[str, Gather] = {
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, 0),
    "roll back": lambda x: x.roll(-1, 0),
    "cut": lambda x: torch.cat([x, x])[1 : 1 + len(x)],
    "pad": lambda x: F.pad(x, (0, 0, 1, 0))[:-1],
    "differences": lambda x: F.pad(x.diff(dim=0), (0, 0, 1, 0)),
    "repeat": lambda x: x.repeat(2, 1)[: len(x)],
    "cumsum": lambda x: x.cumsum(0),
    "cumprod": lambda x: x.cumprod(0),
    "centred": lambda x: x - x.mean(0),
}
"""Operators along the sharded rows, each of which exchanges something."""
TOGETHER: dict[str, Callable[[Gather, Gather, Any], Any]] = {
    "beside": lambda f, g, x: f(x) * g(x),
    "after": lambda f, g, x: f(g(x).sin()),
    "of each other": lambda f, g, x: f(x) * g(f(x)) + g(x),
}


def two_exchanges(first: str, second: str, together: str, rows: int) -> list[list[str]]:
    """The collectives of the forward and the backward graph of this rank, no more than eager has."""
    torch._dynamo.reset()
    mesh, found = init_device_mesh("cpu", (4,), mesh_dim_names=("x",)), []

    def keep(graph: Any, inputs: Any) -> Any:
        found.append([node.target for node in graph.graph.nodes if "_c10d" in str(node.target)])
        return make_boxed_func(graph.forward)

    def run(x: Any) -> Any:
        return TOGETHER[together](EXCHANGES[first], EXCHANGES[second], x)

    values = torch.randn(rows, 3, generator=torch.Generator().manual_seed(rows), dtype=torch.float64)
    single, laid = values.requires_grad_(), distribute_tensor(values.detach(), mesh, [Shard(0)], src_data_rank=None)
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    out = torch.compile(run, backend=backend, fullgraph=True)(laid.requires_grad_())
    close(out.full_tensor(), run(single))
    close(gradients(out, [laid]), gradients(run(single), [single]))
    eager, (there, back) = laid.detach().requires_grad_(), [sum(name != WAIT for name in names) for names in found]
    out, sent = traced_by(lambda: run(eager))
    _, sent_back = traced_by(lambda: torch.autograd.grad(out, [eager], torch.ones_like(out)))
    assert 0 < there <= sum(sent.values())  # what is moved again alike is moved once
    assert back <= sum(sent_back.values())
    return [list(map(str, names)) for names in found]


WAIT = torch.ops._c10d_functional.wait_tensor.default


@pytest.mark.parametrize("seed", one_in(20, range(2, 42)))
def test_exchanges_are_the_same_on_all_ranks_of_uneven_rows(ranks: RankPool, seed: int) -> None:
    """Ranks may send and receive in two exchanges what is equal on them alone, such as nothing."""
    draw = random.Random(seed)
    first, second = draw.sample([*EXCHANGES], 2)
    drawn = first, second, draw.choice([*TOGETHER]), draw.choice([2, 3, 5, 8])
    found, *others = ranks.run(two_exchanges, *drawn)
    assert sum(map(len, found)) > 1
    assert all(other == found for other in others), drawn


def scanned_by_inductor(rows: int) -> list[list[str]]:
    """The collectives that inductor leaves in the forward and the backward graph of this rank."""
    torch._dynamo.reset()
    mesh, found = init_device_mesh("cpu", (4,), mesh_dim_names=("x",)), []

    def keep(graph: Any, inputs: Any, **options: Any) -> Any:
        found.append([str(node.target) for node in graph.graph.nodes if "_c10d" in str(node.target)])
        return make_boxed_func(graph.forward)

    values = torch.randn(rows, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = distribute_tensor(values, mesh, [Shard(0)], src_data_rank=None).requires_grad_()
    backend = partial(compile_fx, inner_compile=keep)
    with torch._functorch.config.patch(enable_autograd_cache=False):
        out = torch.compile(lambda x: x.cumsum(0) + x.cumprod(0), backend=backend, fullgraph=True)(x)
        gradients(out, [x])
    return found


@pytest.mark.thorough
def test_inductor_drops_no_collective_on_ranks_without_rows(ranks: RankPool) -> None:
    """It leaves out operators of no elements, and with them what the backward pass does with its gradient."""
    found, *others = ranks.run(scanned_by_inductor, 3)
    assert min(map(len, found)) > 1
    assert all(other == found for other in others)


# -- errors


def published() -> list[int]:
    """How many errors each rank has published before a graph that fails on all, after it, and after its backward."""
    compiled = torch.compile(lambda x: finite(x * 2), backend="aot_eager", fullgraph=True)
    local = torch.compile(lambda x: finite(x * 2).to_local(), backend="aot_eager", fullgraph=True)
    x, counts = tensor(0, (4, 8), Shard(0), R), [this_world().failures]
    with pytest.raises(ValueError, match="no number here"):
        compiled(x * float("nan"))
    counts.append(this_world().failures)
    with pytest.raises(ValueError, match="no number here"):
        compiled(x).backward(x.detach() * float("nan"))
    counts.append(this_world().failures)
    out = local(x)
    with pytest.raises(ValueError, match="no number here"):
        out.backward(out.detach() * float("nan"))
    return [*counts, this_world().failures]


def test_errors_of_graphs_are_published(ranks: RankPool) -> None:
    for counts in ranks.run(published):
        assert [count - counts[0] for count in counts] == [0, 1, 2, 3]


# -- random values, checkpoints, export


def dropped(x: Any, w: Any) -> Any:
    return F.dropout(F.gelu(F.linear(F.dropout(x, 0.5), w)), 0.5)


def with_noise(x: Any, w: Any) -> Any:
    return F.gumbel_softmax(dropped(x, w)) + dshard.rand(4, 6, device_mesh=x.device_mesh)


def checkpointed(x: Any, w: Any) -> Any:
    return checkpoint(dropped, x, w, use_reentrant=False)


def same_masks() -> None:
    x, w = tensor(0, (4, 8), Shard(0), R), tensor(1, (6, 8), R, Shard(0))
    for f in (with_noise, checkpointed):
        results = []
        for run in (f, torch.compile(f, backend="aot_eager", fullgraph=True)):
            manual_seed(5)
            outs = [run(x, w) for _ in range(3)]
            results.append((torch.stack([out.full_tensor() for out in outs]), gradients(outs[-1], [x, w])))
        close(results[0], results[1])
        assert not results[1][0][0].equal(results[1][0][1])


def test_masks_are_those_of_eager_and_new_in_each_step(ranks: RankPool) -> None:
    ranks.run(same_masks)


def around(x: Any, w: Any) -> None:
    wanted = product(x, w)
    compiled = torch.compile(product, backend="aot_eager", fullgraph=True)
    out = checkpoint(compiled, x, w, use_reentrant=False)
    assert isinstance(out, DTensor)
    close(out.full_tensor(), wanted.full_tensor())
    close(gradients(out, [x, w]), gradients(wanted, [x, w]))


def checkpoint_of_compiled() -> None:
    around(tensor(0, (4, 8), Shard(0), R), tensor(1, (8, 6), R, Shard(1)))


def test_a_checkpoint_around_a_compiled_region(ranks: RankPool) -> None:
    ranks.run(checkpoint_of_compiled)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(tensor(1, (6, 8), R, Shard(0)).detach())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight).unflatten(-1, (3, -1)).softmax(-1)


def exported() -> None:
    net, x = Net(), tensor(0, (4, 8), Shard(0), R, grad=False)
    for strict in (False, True):
        found = torch.export.export(net, (x,), strict=strict).module()(x)
        assert isinstance(found, DTensor)
        close(found.full_tensor(), net(x).full_tensor())


def test_modules_are_exported(ranks: RankPool) -> None:
    ranks.run(exported)


def written_down() -> None:
    x, w = tensor(0, (4, 8), Shard(0), R, grad=False), tensor(1, (6, 8), R, Shard(1), grad=False)
    functions: tuple[Any, ...] = (
        lambda x, w: F.layer_norm(F.linear(x, w), (6,)).tanh(),
        lambda x, w: F.cross_entropy(F.linear(x, w), F.softmax(x @ w.t(), 1)),
    )
    for function in functions:
        close(make_fx(function)(x, w)(x + 1, w * 2).full_tensor(), function(x + 1, w * 2).full_tensor())
    constants: tuple[Any, ...] = (
        lambda x: F.linear(x, w),
        lambda x: x.full_tensor() * 2,
        lambda x: x.to_local() * 2,
        lambda x: x.redistribute(placements=[R, R]) * 2,
    )
    for function in constants:
        with pytest.raises(CompileError, match=r"within make_fx.* as the constant .*; pass all tensors"):
            make_fx(function)(x)
    with pytest.raises(CompileError, match=r"or torch\.func\.linearize"):
        torch.func.linearize(torch.tanh, x)


def test_graphs_of_operators_hold_no_constants_of_their_inputs(ranks: RankPool) -> None:
    ranks.run(written_down)


# -- explained


def explained() -> tuple[list[str], list[str], list[str]]:
    x = tensor(0, (8, 8), Shard(0), Replicate(), grad=False)
    compiled: Any = torch.compile(lambda a: (a @ a).relu(), backend="eager")
    queries = tensor(0, (1, 2, 128, 8), Replicate(), Shard(1), grad=False).to(torch.float32)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, "cpu")
    functions = (
        lambda: compiled(x),
        lambda: compiled(x),
        lambda: flex_attention(queries, queries, queries, None, mask),
    )
    first, again, flex = ([operator.op for operator in dshard.explain(f).operators] for f in functions)
    return first, again, flex


@pytest.mark.ranks
def test_explain_lists_what_runs_and_not_what_torch_traces(ranks: RankPool) -> None:
    """The mask of torch's `flex_attention` is traced, and runs within it."""
    for first, again, flex in ranks.run(explained):
        assert first == again == ["matmul", "aten.relu.default"]
        assert flex == ["attention"]
