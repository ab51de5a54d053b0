"""What a compiled step of a sharded GPT block costs over the compiled plain local block with the same collectives.

    python benchmarks/compile.py [--backend inductor] [--repeats 15] [--ranks] [--write]

A fake process group of four ranks, so that nothing is sent, or, with `--ranks`, four of gloo; one thread; the block
under Megatron's layout, forward and backward; medians of interleaved repeats. The plain block has the local
parameters, and functional collectives by hand: an all_reduce after each of the two products of rows, and one of the
gradient before each product of columns. *Wrapped* is that block with its parameters and input in a tensor subclass
that does nothing but hold them: what torch takes for any subclass that is written in Python.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from section import markdown_table, write_section
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map_only

from dshard import Replicate, Shard, distribute_tensor, init_device_mesh
from dshard.testing import rank_pool

RANKS, HEADS = 4, 8
_c10d = torch.ops._c10d_functional


class Block(nn.Module):
    """Causal attention and a perceptron, of `heads` heads and `hidden` features that are computed here."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        inner = width // HEADS * heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * inner, bias=False), nn.Linear(inner, width, bias=False)
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def enter(self, x: Tensor) -> Tensor:
        return x

    def leave(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.enter(self.norm1(x))).unflatten(-1, (self.heads, -1)).transpose(1, 2).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.leave(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.leave(self.down(F.gelu(self.up(self.enter(self.norm2(x))))))


class Sharded(Block):
    def leave(self, x: Any) -> Any:
        return x.redistribute(placements=[Replicate()])


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _c10d.wait_tensor(_c10d.all_reduce(grad.contiguous(), "sum", ctx.group)), None


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return _c10d.wait_tensor(_c10d.all_reduce(x, "sum", group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Plain(Block):
    group = ""

    def enter(self, x: Tensor) -> Tensor:
        return Enter.apply(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        return Leave.apply(x, self.group)


class Bare(Tensor):
    """A tensor in a wrapper, and nothing else."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        make = Tensor._make_wrapper_subclass
        return make(cls, inner.shape, inner.stride(), None, None, inner.dtype, torch.strided, inner.device)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:  # which runs for each gradient
            return Bare(args[0].inner.detach())
        given = tree_map_only(Bare, lambda x: x.inner, (args, kwargs or {}))
        return tree_map_only(Tensor, Bare, func(*given[0], **given[1]))

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], meta: None, size: Any, stride: Any) -> Bare:
        return Bare(parts["inner"])


def wrapped(block: Plain) -> Plain:
    """The block with its parameters in wrappers."""
    for module in block.children():
        for own, parameter in list(module.named_parameters()):
            module.register_parameter(own, nn.Parameter(Bare(parameter.detach())))
    return block


def sharded(width: int, mesh: Any) -> nn.Module:
    block = Sharded(width, HEADS, 4 * width)
    for name, module in block.named_children():
        split = {"qkv": Shard(0), "up": Shard(0), "out": Shard(1), "down": Shard(1)}.get(name, Replicate())
        for own, parameter in list(module.named_parameters()):
            laid = distribute_tensor(parameter.detach(), mesh, [split], src_data_rank=None)
            module.register_parameter(own, nn.Parameter(laid))
    return block


def step(block: nn.Module, x: Any, grad: Any, backend: str) -> Callable[[], None]:
    """One step, compiled when it is first run."""
    compiled = torch.compile(block, backend=backend, fullgraph=True)

    def run() -> None:
        compiled(x).backward(grad)
        for parameter in block.parameters():
            parameter.grad = None

    return run


def measure(width: int, batch: int, backend: str, repeats: int) -> dict[str, float]:
    """Medians in microseconds, and those of the ratios."""
    torch.set_num_threads(1)
    torch._dynamo.reset()  # graphs of other sizes would be asked first whether they fit
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    values = torch.randn(batch, 16, width)
    x = distribute_tensor(values, mesh, [Replicate()], src_data_rank=None)
    plain, bare = (Plain(width, HEADS // RANKS, 4 * width // RANKS) for _ in range(2))
    plain.group = bare.group = mesh.get_group().group_name
    blocks = {"dshard": (sharded(width, mesh), x), "wrapped": (wrapped(bare), Bare(values)), "plain": (plain, values)}
    steps = {name: step(block, given, torch.ones_like(given), backend) for name, (block, given) in blocks.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(repeats + 2):
        for name, run in steps.items():
            begin = time.perf_counter()
            for _ in range(10):
                run()
            if turn > 1:
                times[name].append((time.perf_counter() - begin) / 10 * 1e6)
    found = {name: statistics.median(each) for name, each in times.items()}
    for name in ("dshard", "wrapped"):
        ratios = [a / b for a, b in zip(times[name], times["plain"], strict=True)]
        found[f"{name} ratio"] = statistics.median(ratios)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--ranks", action="store_true", help="send, on four gloo ranks")
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks.md")
    options = parser.parse_args()
    pool = rank_pool(RANKS) if options.ranks else None
    if pool is None:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    rows = []
    for width, batch in ((64, 2), (256, 4), (512, 8)):
        case = width, batch, options.backend, options.repeats
        found = measure(*case) if pool is None else pool.run(measure, *case, timeout=600.0)[0]
        microseconds = [f"{found[name]:.0f}" for name in ("dshard", "wrapped", "plain")]
        ratios = [f"{found[name]:.2f}" for name in ("dshard ratio", "wrapped ratio")]
        rows.append([str(width), str(batch), *microseconds, *ratios])
    table = markdown_table(
        ["width", "batch", "dshard us", "wrapped us", "plain local us", "dshard / plain", "wrapped / plain"], rows
    )
    print(table)
    if options.write:
        command = f"`python benchmarks/compile.py{' --ranks' * options.ranks} --write`"
        text = f"{command}: a GPT block, forward and backward, backend {options.backend}."
        write_section("compile-ranks" if options.ranks else "compile", f"{text}\n\n{table}")


if __name__ == "__main__":
    main()
