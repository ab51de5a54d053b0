"""What compiled blocks of a GPT, a Llama and a ViT cost over the same local computation and collectives without dshard.

    python benchmarks/compile_blocks.py [--width 512] [--tokens 128] [--batch 8] [--repeats 9] [--write]

Each block is laid out as Megatron, SUMMA, Tesseract and ATP do, on a fake process group, so that nothing is sent; one
thread; forward and backward by inductor. The plain module has the local parameters and runs the two graphs that torch's
AOTAutograd makes of the sharded block, operators and functional collectives on plain tensors, as one autograd function;
it is compiled by torch like any module. What is sent for gradients after the graph, as in eager, the plain module
leaves out. Medians of interleaved repeats, the ratio of those of neighbours.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from section import markdown_table, write_section
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.testing._internal.distributed.fake_pg import FakeStore

from dshard import DTensor, distribute_tensor, init_device_mesh, use_strategy

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from helpers.transformer_blocks import BLOCKS, LAYOUTS, lay_out


@dataclass
class Graphs:
    """The forward and the backward graph on local tensors, and what the first was given."""

    forward: Any = None
    backward: Any = None
    given: list[Tensor] = field(default_factory=list)

    def keep_forward(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.forward = graph

        def run(*args: Tensor) -> Any:
            self.given = list(args)
            return graph(*args)

        return run

    def keep_backward(self, graph: Any, inputs: Any) -> Any:
        self.backward = graph
        return graph


def graphs_of(block: nn.Module, x: Any) -> Graphs:
    """Those of a sharded block, traced once."""
    found = Graphs()
    backend = aot_autograd(fw_compiler=found.keep_forward, bw_compiler=found.keep_backward)
    out = torch.compile(block, backend=backend, fullgraph=True)(x)
    out.backward(torch.ones_like(out))
    return found


class Plain(nn.Module):
    """What one rank computes and sends, on plain tensors."""

    def __init__(self, block: nn.Module, x: DTensor, graphs: Graphs) -> None:
        super().__init__()
        tensors = [x, *block.parameters(), *block.buffers()]
        number = {t._local_tensor.data_ptr(): i for i, t in enumerate(tensors)}
        self.places = [number[t.data_ptr()] for t in graphs.given]
        self.local = nn.ParameterList([nn.Parameter(p._local_tensor.clone()) for p in block.parameters()])
        self.constant = [b._local_tensor for b in block.buffers()]
        forward, backward = graphs.forward, graphs.backward

        class Run(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *given: Tensor) -> Tensor:
                out, *saved = forward(*given)
                ctx.save_for_backward(*saved)
                ctx.shapes = [t.shape for t in given]
                return out

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Any:
                grads = zip(backward(*ctx.saved_tensors, grad), ctx.shapes, strict=True)
                return tuple(None if g is None else fitted(g, shape) for g, shape in grads)

        self.run = Run

    def forward(self, x: Tensor) -> Tensor:
        tensors = [x, *self.local, *self.constant]
        return self.run.apply(*[tensors[i] for i in self.places])


def fitted(grad: Tensor, shape: Sequence[int]) -> Tensor:
    """A gradient cut, or filled up, to the shape of its tensor: what is sent after the graph would do that."""
    missing = [want - have for want, have in zip(shape, grad.shape, strict=True)]
    return F.pad(grad, [n for each in reversed(missing) for n in (0, each)]) if any(missing) else grad


def stepper(block: nn.Module, x: Any, grad: Any) -> Callable[[], None]:
    compiled = torch.compile(block, backend="inductor", fullgraph=True)

    def run() -> None:
        compiled(x).backward(grad)
        for parameter in block.parameters():
            parameter.grad = None

    return run


def measure(name: str, layout: str, options: argparse.Namespace) -> list[float]:
    """Milliseconds of dshard's step and of the plain one, and quartiles of the ratio."""
    torch._dynamo.reset()
    laid = LAYOUTS[layout]
    mesh = init_device_mesh("cpu", laid.mesh.shape, mesh_dim_names=laid.mesh.names)
    block = lay_out(BLOCKS[name](options.width, options.tokens), mesh, laid)
    values = torch.randn(options.batch, options.tokens, options.width)
    x = distribute_tensor(values, mesh, laid.inputs, src_data_rank=None)
    with use_strategy(matmul=laid.matmul) if laid.matmul else nullcontext():
        plain = Plain(block, x, graphs_of(block, x))
        torch._dynamo.reset()
        local = x.to_local()
        out = block(x).detach()
        grads = torch.ones_like(out), torch.ones_like(plain(local))
        steps = [stepper(block, x, grads[0]), stepper(plain, local, grads[1])]
        return compared(steps, options.repeats)


def compared(steps: Sequence[Callable[[], None]], repeats: int) -> list[float]:
    for step in steps:
        for _ in range(3):
            step()
    times: list[list[float]] = [[], []]
    for _ in range(repeats):
        for step, found in zip(steps, times, strict=True):
            begin = time.perf_counter()
            for _ in range(5):
                step()
            found.append((time.perf_counter() - begin) / 5 * 1e3)
    low, middle, high = statistics.quantiles([a / b for a, b in zip(*times, strict=True)], n=4)
    return [*map(statistics.median, times), middle, low, high]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", nargs=2, metavar=("BLOCK", "LAYOUT"), help="one block under one layout")
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks.md")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    rows = []
    for name, layout in [options.only] if options.only else [(name, layout) for name in BLOCKS for layout in LAYOUTS]:
        ours, plain, middle, low, high = measure(name, layout, options)
        cells = [name, layout, f"{ours:.1f}", f"{plain:.1f}", f"{middle:.3f}", f"{low:.3f} to {high:.3f}"]
        print(*cells, sep="  ", flush=True)
        rows.append(cells)
    if options.write:
        size = f"Width {options.width}, {options.tokens} tokens, batch {options.batch}, backend inductor."
        header = ["block", "layout", "dshard ms", "plain local ms", "dshard / plain", "quartiles"]
        write_section("compile-blocks", f"{size}\n\n{markdown_table(header, rows)}")


if __name__ == "__main__":
    main()
