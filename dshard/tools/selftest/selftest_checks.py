"""The checks of the self-test on every rank: results on the device under test, compared with one device.

Each check returns what it has compared, and raises where something differs.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dshard import checkpoint, factories, functional
from dshard.comm import HALF, DeviceMesh, bind, gather_objects, group_rank, init_device_mesh
from dshard.distribute import distribute_tensor
from dshard.errors import LayoutError, MeshError, StrategyError
from dshard.explain import explain
from dshard.ops.matmul.options import use_strategy
from dshard.ops.random import manual_seed
from dshard.parallel import parallelize
from dshard.placements import Partial, Placement, Replicate, Shard
from dshard.replay import replay
from dshard.rules.matmul_loops import strategies
from dshard.rules.panel_stream import Stream
from dshard.tables import human_bytes
from dshard.testing.host_sync import no_host_sync
from dshard.tools.calibrate import measure
from dshard.tools.calibrate.block_program import TransformerBlock
from dshard.topology import default_topology
from dshard.trace import trace

MOVED = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int16, torch.bool, torch.complex64)
"""The dtypes that are redistributed."""
PLANS: dict[str, tuple[str, ...]] = {
    "data": ("dp",),
    "fsdp": ("x",),
    "megatron": ("dp", "tp"),
    "optimus": ("r", "c"),
    "tesseract": ("d", "r", "c"),
    "atp": ("d1", "d2"),
}
"""The plans of training steps, and the axes of their meshes."""
CAPTURED = ("fsdp", "megatron")
"""The plans of steps that are captured in a CUDA graph."""
ATTENDED = (torch.bfloat16, torch.float16, torch.float32)
"""The dtypes of attention."""
LOOPS = ("ring", "balanced ring", "context", "ulysses", "split-keys")
"""The loops of attention, of sequences that are split."""
_WARM = 3
"""Steps before one is captured."""
_MEASURING = 1.0  # seconds


_PARTIAL: list[list[Placement]] = [[Partial(), Replicate()], [Replicate(), Partial()], [Partial(), Partial()]]
_COMPLETE: list[list[Placement]] = [[Replicate(), Replicate()], [Shard(0), Shard(1)], [Shard(1), Replicate()]]


class Differs(AssertionError):
    """Raised for a result that differs from that of one device."""


@dataclass(frozen=True, slots=True)
class Place:
    """The type of device and the number of ranks on which the checks run."""

    device: str
    ranks: int
    _meshes: dict[tuple[str, ...], DeviceMesh] = field(default_factory=dict, init=False, compare=False, repr=False)

    def mesh(self, *names: str) -> DeviceMesh:
        """Return the mesh of all ranks with these axes: two ranks along the first, all others along the second."""
        first = 2 if len(names) > 1 and self.ranks % 2 == 0 else self.ranks if len(names) == 1 else 1
        shape = (first, *[self.ranks // first, *[1] * len(names)][: len(names) - 1])
        if names not in self._meshes:  # NCCL takes up to a second for each of its process groups
            self._meshes[names] = init_device_mesh(self.device, shape, mesh_dim_names=names)
        return self._meshes[names]

    def has_own_gpus(self) -> bool:
        """Whether each rank has a GPU of its own."""
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", self.ranks))
        return self.device == "cuda" and local_ranks <= torch.cuda.device_count()

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Random numbers, equal on all ranks, made on the CPU."""
        return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).mul(8).to(self.device, dtype)


def redistributions(place: Place) -> str:
    """Redistribute tensors of several dtypes between the layouts of a mesh of two axes."""
    mesh, count = place.mesh("a", "b"), 0
    options: list[Placement] = [Replicate(), Shard(0), Shard(1)]
    layouts = [(a, b) for a in options for b in options]
    for i, dtype in enumerate(MOVED):
        tensor = place.randn(7, 5, dtype=dtype)
        for src in layouts:
            x = distribute_tensor(tensor, mesh, src, src_data_rank=None)
            for dst in layouts[i % 3 :: 3]:
                _same(x.redistribute(mesh, dst).full_tensor(), tensor, f"{dtype} from {src} to {dst}")
                count += 1
    return f"{count} between layouts, {len(MOVED)} dtypes, uneven"


def reductions(place: Place) -> str:
    """Redistribute partial sums of several dtypes to every layout without partials."""
    mesh, count = place.mesh("a", "b"), 0
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        tensor = place.randn(7, 6, dtype=dtype)
        for source in _PARTIAL:
            for target in _COMPLETE:
                x = distribute_tensor(tensor, mesh, source, src_data_rank=None)
                _same(x.redistribute(mesh, target).full_tensor(), tensor, f"{dtype} from {source} to {target}", 1e-1)
                count += 1
    return f"{count} from partial layouts"


def products(place: Place, *names: str) -> str:
    """Check a matmul and its gradients under these strategies, by default all, where a mesh of these ranks has them."""
    done = []
    for name in names or strategies():
        for mesh in (place.mesh("x"), place.mesh("x", "y"), place.mesh("x", "y", "z")):
            try:
                _product(place, mesh, name)
            except (StrategyError, LayoutError, MeshError):  # not on a mesh of this form
                continue
            done.append(name)
            break
    if not done:
        raise Differs("no strategy has run")
    return ", ".join(done)


def symmetric_memory(place: Place) -> str:
    """Check a matmul and its gradients by torch's kernels for symmetric memory, where the ranks have that."""
    if place.device == "cuda" and not place.has_own_gpus():
        return "none between ranks that share a GPU"
    mesh, peers = place.mesh("x"), range(torch.cuda.device_count() if place.device == "cuda" else 0)
    reads = all(torch.cuda.can_device_access_peer(i, j) for i in peers for j in peers if i != j)
    if place.ranks == 1 or not all(gather_objects(reads)):
        return "one rank sends nothing" if reads else "GPUs here cannot read each other's memory"
    by_kernel, ways = Stream(1, transport="symmetric"), {"column-sequence": [Shard(0)], "row-sequence": [Shard(1)]}
    for name, at in ways.items():
        try:
            report = explain(partial(_product, place, mesh, name, 4 * place.ranks, at, by_kernel))
        except StrategyError:
            return "none without GPUs over NCCL"
        if report.operators[0].transport != by_kernel.transport:
            return "the ranks are on several hosts"
    return f"{', '.join(ways)}, with gradients"


def _product(
    place: Place,
    mesh: DeviceMesh,
    name: str,
    rows: int = 12,
    at: Sequence[Placement] = (),
    panels: Stream | None = None,
) -> None:
    x, w = place.randn(rows, 16).requires_grad_(), place.randn(16, 8).requires_grad_()
    expected = x @ w
    expected.square().sum().backward()
    layouts = (at or [Replicate()] * mesh.ndim, [Replicate()] * mesh.ndim)
    dx, dw = (
        distribute_tensor(t.detach(), mesh, placements, src_data_rank=None).requires_grad_()
        for t, placements in zip((x, w), layouts, strict=True)
    )
    out = functional.matmul(dx, dw, strategy=name, panels=panels)
    out.square().sum().backward()
    pairs = {"product": (out, expected), "gradient of x": (dx.grad, x.grad), "gradient of w": (dw.grad, w.grad)}
    for what, (result, right) in pairs.items():
        assert result is not None
        assert right is not None
        _same(_global(result), right, f"{name}: {what}", 1e-3)


def attention(place: Place, *dtypes: torch.dtype) -> str:
    """Check attention by every loop, in these dtypes: its errors are at most four times those of one device."""
    if place.ranks == 1:
        return "one rank has no loops"
    mesh, n, dtypes = place.mesh("x"), 16 * place.ranks + 1, dtypes or ATTENDED
    for dtype in dtypes:
        given = [
            place.randn(2, heads, n, 40 + i).narrow(-1, i, 40).div(8).to(dtype)
            for i, heads in enumerate((2 * place.ranks, place.ranks, place.ranks, 2 * place.ranks))
        ]
        for causal in (False, True):
            exact, alone = (_attended([x.to(kind) for x in given], causal) for kind in (torch.float64, dtype))
            for loop in LOOPS:
                laid = [distribute_tensor(x, mesh, [Shard(2)], src_data_rank=None) for x in given]
                with use_strategy(attention=loop):
                    found = _attended(laid, causal)
                for i, (mine, one, right) in enumerate(zip(found, alone, exact, strict=True)):
                    far, may_be = ((x.double() - right).norm() / right.norm() for x in (mine, one))
                    if not far <= 4 * may_be + (0 if dtype in HALF else 8 * torch.finfo(dtype).eps):
                        which = ("result", "gradient of query", "gradient of key", "gradient of value")[i]
                        what = f"{loop}, {dtype}, {causal=}: the {which}"
                        raise Differs(f"{what} is off by {far}, that of one device by {may_be}")
    return f"{', '.join(LOOPS)}; {len(dtypes)} dtypes, causal and not, with gradients"


def _attended(given: Sequence[Tensor], causal: bool) -> list[Tensor]:
    """Attention of query, key and value, and their gradients by that of the result, which is the last of `given`."""
    q, k, v = (x.detach().requires_grad_() for x in given[:3])
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    return [_global(x.detach()) for x in (out, *torch.autograd.grad(out, (q, k, v), given[3]))]


def model_of(place: Place, width: int, blocks: int = 2) -> nn.Sequential:
    """A stack of transformer blocks with causal attention, the same on all ranks."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(*(TransformerBlock(width, causal=True) for _ in range(blocks))).to(place.device)


def training_steps(place: Place, *plans: str) -> str:
    """Check the losses and parameters of two training steps of a small model under these plans, by default all."""
    x, right = place.randn(4 * place.ranks, 6, 32).div(8), model_of(place, 32)
    step, plans = _step_of(right), plans or tuple(PLANS)
    expected = [step(x) for _ in range(2)]
    for name in plans:
        model = parallelize(model_of(place, 32), place.mesh(*PLANS[name]), name, x)
        step = _step_of(model)
        for loss in expected:
            _same(_global(step(x)), loss, f"{name}: the loss", 1e-4)
        _same_parameters(model, right, f"{name}, after two steps")
    return ", ".join(plans)


def captured_steps(place: Place, *plans: str) -> str:
    """Check the parameters after a step captured in a CUDA graph and replayed on new numbers, under these plans."""
    plans = plans or CAPTURED
    x, y = (place.randn(4 * place.ranks, tokens, 32)[:, :6].div(8) for tokens in (6, 7))
    right = model_of(place, 32, blocks=1)
    run = partial(_step_of(right), batch := x.clone())
    for _ in range(_WARM):
        run()
    batch.copy_(y)
    run()
    for name in plans:
        model, other = (parallelize(model_of(place, 32, blocks=1), place.mesh(*PLANS[name]), name, x) for _ in range(2))
        replay = captured(place.device, partial(_step_of(model), batch.copy_(x)), _WARM)
        _step_of(other)(x)  # whose buffers must not be those of the graph
        batch.copy_(y)
        replay()
        _same_parameters(model, right, f"{name}, after a captured step")
    how = "captured and replayed" if place.device == "cuda" else "not captured without CUDA, but the host never waits"
    return f"{', '.join(plans)}: {how}"


def replayed_steps(place: Place) -> str:
    """Check the parameters after training steps that are replayed, on other numbers in each, under some plans.

    On CUDA the replays are launches of a CUDA graph.
    """
    x = place.randn(4 * place.ranks, 6, 32).div(8)
    batches = [x, x.flip(0)] * _WARM
    right, replays = model_of(place, 32, blocks=1), list[str]()
    run = _step_of(right)
    for batch in batches:
        run(batch)
    for name in CAPTURED:
        model = parallelize(model_of(place, 32, blocks=1), place.mesh(*PLANS[name]), name, x)
        step = replay(_step_of(model), cuda_graph=place.device == "cuda")
        for batch in batches:
            step(batch)
        _same_parameters(model, right, f"{name}, after replayed steps")
        replays.append(f"{name}: {step.replays} of {len(batches)} {step.why_not or 'replayed'}")
    return "; ".join(replays)


def _step_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return a training step of the model on a batch, which returns the loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def captured(device: str, step: Callable[[], object], warm: int) -> Callable[[], object]:
    """Run `step` `warm` times, capture it in a CUDA graph, and return the function that replays the graph.

    Without CUDA it is the step itself, once the last of these times has shown that the host does not wait in it.
    """
    if device != "cuda":
        for _ in range(warm - 1):
            step()
        with no_host_sync():
            step()
        return step
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(warm):
            step()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog, another thread, asks for events
        step()
    return graph.replay


def resharding(place: Place) -> str:
    """Reshard a tensor to another mesh of the same ranks, and distribute it over a slice of the mesh."""
    first, tensor = place.mesh("a", "b"), place.randn(9, 7)
    x = distribute_tensor(tensor, first, [Shard(0), Shard(1)], src_data_rank=None)
    second = place.mesh("c")
    _same(x.redistribute(second, [Shard(1)]).full_tensor(), tensor, "to a mesh of other axes")
    if place.ranks % 2:
        return "to a mesh of other axes"
    half = first["b"] if isinstance(first, DeviceMesh) else first
    y = distribute_tensor(tensor, half, [Shard(0)], src_data_rank=None)
    _same(y.full_tensor(), tensor, "on a slice of the mesh")
    return "to a mesh of other axes; on a slice"


def random_numbers(place: Place) -> str:
    """Check that random numbers are equal in every layout."""
    mesh, draws = place.mesh("a", "b"), []
    for layout in ([Replicate(), Replicate()], [Shard(0), Shard(1)], [Shard(1), Shard(0)]):
        manual_seed(7)
        draws.append(factories.randn(9, 6, device_mesh=mesh, placements=layout).full_tensor())
    for draw in draws[1:]:
        if not torch.equal(draw, draws[0]):
            raise Differs("random numbers depend on the layout")
    return f"{len(draws)} layouts"


def checkpoints(place: Place) -> str:
    """Read in one layout a checkpoint written in another."""
    (path,) = set(gather_objects(tempfile.mkdtemp(prefix="dshard-selftest-") if group_rank() == 0 else None)) - {None}
    mesh, tensor = place.mesh("a", "b"), place.randn(9, 6)
    try:
        source = distribute_tensor(tensor, mesh, [Shard(0), Shard(1)], src_data_rank=None)
        checkpoint.save({"w": source}, Path(path) / "state")
        target = distribute_tensor(torch.zeros_like(tensor), mesh, [Shard(1), Replicate()], src_data_rank=None)
        checkpoint.load({"w": target}, Path(path) / "state")
        _same(target.full_tensor(), tensor, "what is read back")
        gather_objects(None)  # nobody removes what another still reads
    finally:
        if group_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
    return "saved in one layout, loaded in another"


def overhead(place: Place) -> str:
    """Report a block's hidden time of forward and backward relative to plain torch under "data"; nothing is checked."""
    figures = []
    for width in (1024, 2048, 4096, 8192) if place.has_own_gpus() else (256,):
        x = place.randn(2, 64, width).div(8)
        plain = _seconds(place, model_of(place, width, blocks=1), x)
        mesh = place.mesh("tp", "one") if place.ranks == 1 else place.mesh("dp")
        block = parallelize(model_of(place, width, blocks=1), mesh, "data", x.repeat(place.ranks, 1, 1))
        figures.append(f"{width}: {_seconds(place, block, x.repeat(place.ranks, 1, 1)) / plain:.2f}x")
    return "time of a block, dshard to plain torch, hidden " + ", ".join(figures)


def network(place: Place) -> str:
    """Report the measured link of an all_gather and the one assumed; nothing is checked."""
    if place.ranks == 1:
        return "one rank has none"
    if place.device == "cuda" and not place.has_own_gpus():
        return "not measured, as ranks share a GPU"
    mesh = bind(place.mesh("x"))
    measured = measure(mesh, seconds=_MEASURING, collectives=("all_gather",)).link(mesh, ["x"], "all_gather")
    assumed = default_topology(place.device).link(mesh, ["x"], "all_gather")
    figures = (f"{link.bandwidth / 1e9:.3g} GB/s, {link.latency * 1e6:.3g} us" for link in (measured, assumed))
    return "all_gather at {}; assumed until measured: {}".format(*figures)


def memory(place: Place) -> str:
    """Report the peak bytes of torch's allocator in a step, on one device and on a rank under "fsdp"."""
    if place.device != "cuda":
        return "counted on CUDA alone"
    x = place.randn(4 * place.ranks, 64, 512).div(8)
    plain = _peak_bytes(model_of(place, 512), x)
    sharded = _peak_bytes(parallelize(model_of(place, 512), place.mesh("x"), "fsdp", x), x)
    return f"a step holds {human_bytes(plain)} on one device, {human_bytes(sharded)} on a rank of fsdp"


def _peak_bytes(model: nn.Module, x: Tensor) -> int:
    torch.cuda.reset_peak_memory_stats()
    model(x).square().mean().backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def _seconds(place: Place, model: nn.Module, x: Tensor) -> float:
    times = []
    for _ in range(5):
        _synchronize(place)
        begin = perf_counter()
        model(x).square().mean().backward()
        _synchronize(place)
        times.append(perf_counter() - begin)
    return min(times)


def _synchronize(place: Place) -> None:
    if place.device == "cuda":
        torch.cuda.synchronize()


def traffic(place: Place) -> str:
    """Check that all ranks run the same collectives in a training step, as counted by `trace`."""
    x = place.randn(4 * place.ranks, 6, 32).div(8)
    model = parallelize(model_of(place, 32), place.mesh("x"), "fsdp", x)
    with trace() as traced:
        model(x).square().mean().backward()
    counts = gather_objects([(event.collective, event.axis) for event in traced.events])
    if any(count != counts[0] for count in counts):
        raise Differs(f"the ranks ran different collectives: {[len(count) for count in counts]}")
    return f"{len(counts[0])} collectives in a step of fsdp, {sum(event.nbytes for event in traced.events):,} bytes"


def _global(x: Tensor) -> Tensor:
    full = getattr(x, "full_tensor", None)
    out: Tensor = x if full is None else full()
    return out


def _same_parameters(model: nn.Module, right: nn.Module, what: str) -> None:
    for (name, value), expected in zip(model.named_parameters(), right.parameters(), strict=True):
        _same(_global(value.detach()), expected.detach(), f"{what}: {name}", 1e-4)


def _same(result: Tensor, expected: Tensor, what: str, tolerance: float = 0.0) -> None:
    try:
        torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    except AssertionError as error:
        raise Differs(f"{what}: {error}") from error


CHECKS: dict[str, Callable[[Place], str]] = {
    "redistributions": redistributions,
    "reductions": reductions,
    "products": products,
    "attention": attention,
    "training steps": training_steps,
    "replayed steps": replayed_steps,
    "collectives of a step": traffic,
    "other meshes": resharding,
    "random numbers": random_numbers,
    "checkpoints": checkpoints,
    "overhead": overhead,
    "memory": memory,
    "network": network,
    "captured steps": captured_steps,
    "symmetric memory": symmetric_memory,
}
"""The checks, in the order in which they run."""
