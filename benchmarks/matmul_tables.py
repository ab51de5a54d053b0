"""What products and blocks move and hold, beside torch's DTensor: exact counts on meshes that need not exist here.

Tensors are on the meta device, so nothing is computed or sent; what would be sent is announced step by step and added
up, as received by the busiest rank. torch's figures are those of torch 2.13 on a fake process group, metered collective
by collective. `--write` puts the tables into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from section import markdown_table, write_section
from torch.utils.flop_counter import FlopCounterMode

from dshard import DTensor, Layout, Mesh, Partial, Placement, Replicate, Shard, matmul, trace, use_topology
from dshard.autograd.crossing import redistribute
from dshard.redistribute import plan
from dshard.topology import BYTES
from dshard.trace import Trace

MIB = 2**20
LETTERS: dict[str, Placement] = {"R": Replicate(), "P": Partial(), **{f"S{i}": Shard(i) for i in range(3)}}


def layout(mesh: Mesh, text: str) -> Layout:
    """The layout that `S0 R` writes."""
    return Layout(mesh, tuple(LETTERS[word] for word in text.split()))


def tensor(mesh: Mesh, shape: tuple[int, ...], text: str) -> DTensor:
    """A tensor without data, laid out so."""
    laid = layout(mesh, text)
    local = torch.empty(laid.local_shape(shape, (0,) * mesh.ndim), device="meta")
    return DTensor.from_local(local, mesh, laid.placements, shape=shape)


def mib(sent: Trace) -> float:
    """MiB received by the busiest rank, step by step."""
    return sum(event.nbytes for event in sent.events) / MIB


def completed(x: DTensor) -> DTensor:
    """`x` with its partial sums completed in the cheapest way."""
    axes = x.layout.partial_axes()
    if not axes:
        return x
    ends = []
    for dim in (None, *range(x.ndim)):
        end = x.layout
        for axis in axes:
            end = end.replace(axis, Replicate() if dim is None else Shard(dim))
        ends.append(end)
    return redistribute(x, min(ends, key=lambda end: plan(x.layout, end, tuple(x.shape), x.itemsize, BYTES).busiest()))  # type: ignore[no-any-return]


# -- products


@dataclass(frozen=True, slots=True)
class Product:
    """One product, with MiB per rank: torch's to a result that is not partial, and the best that was known."""

    name: str
    mesh: tuple[int, ...]
    a: str
    b: str
    torch_mib: float
    best_mib: float
    sizes: tuple[int, int, int] = (1024, 1024, 1024)
    result: str | None = None
    unattainable: bool = False

    def measured(self) -> tuple[float, float]:
        """MiB that dshard moves, and its FLOPs over those of the product."""
        mesh, (m, k, n) = Mesh(self.mesh), self.sizes
        a, b = tensor(mesh, (m, k), self.a), tensor(mesh, (k, n), self.b)
        out = None if self.result is None else layout(mesh, self.result).placements
        work = FlopCounterMode(display=False)
        with use_topology(BYTES), torch.no_grad(), trace() as sent:
            with work:
                c = matmul(a, b, out_placements=out)
            completed(c)
        local = work.get_total_flops() - 2 * m * k * n  # the counter sees the product of whole tensors, too
        return mib(sent), local * mesh.size / (2 * m * k * n)


PRODUCTS = (
    Product("SUMMA", (2, 2), "S0 S1", "S0 S1", 2.0, 2.0),
    Product("SUMMA", (4, 4), "S0 S1", "S0 S1", 1.5, 1.5),
    Product("SUMMA", (8, 8), "S0 S1", "S0 S1", 0.875, 0.875),
    Product("B turned", (4, 4), "S0 S1", "S1 S0", 1.5, 1.5),
    Product("Tesseract", (2, 2, 2), "S0 S1 S0", "S0 S1 R", 1.5, 1.5),
    Product("Tesseract", (4, 4, 2), "S0 S1 S0", "S0 S1 R", 1.125, 1.125),
    Product("2.5-D", (2, 2, 2), "S0 S1 R", "S0 S1 R", 1.5, 1.5),
    Product("2.5-D", (4, 4, 2), "S0 S1 R", "S0 S1 R", 1.125, 0.875),
    Product("2.5-D", (8, 8, 4), "S0 S1 R", "S0 S1 R", 0.547, 0.266),
    Product("2.5-D, depth first", (2, 4, 4), "R S0 S1", "R S0 S1", 1.5, 0.875),
    Product("k over depth", (2, 2, 2), "S0 S1 S1", "S0 S1 S0", 2.25, 1.5),
    Product("k over depth", (4, 4, 2), "S0 S1 S1", "S0 S1 S0", 1.312, 0.875),
    Product("k over depth first", (2, 4, 4), "S1 S0 S1", "S0 S0 S1", 0.875, 0.875),
    Product("ATP column-first", (2, 4), "R S1", "S1 S0", 3.0, 3.0),
    Product("ATP row-first", (2, 4), "S1 R", "S0 S1", 1.0, 1.0),
    Product("ATP chained", (4, 4), "S1 P", "S0 S1", 12.75, 3.0),
    Product("rows by columns", (8,), "S0", "S1", 4.375, 3.5),
    Product("partial by columns", (8,), "P", "S1", 7.0, 7.0),
    Product("both whole", (8,), "R", "R", 0.0, 0.0),
)
RECTANGLES = tuple(
    Product(f"{m} x {k} x {n}", (4, 4), "S0 S1", "S0 S1", theirs, best, (m, k, n), "S0 S1", unattainable)
    for m, k, n, theirs, best, unattainable in (
        (1024, 1024, 1024, 1.5, 1.5, False),
        (8192, 1024, 1024, 9.75, 6.75, False),
        (1024, 1024, 8192, 7.5, 6.75, False),
        (1024, 8192, 1024, 12.0, 6.75, True),
        (8192, 8192, 256, 9.0, 3.0, True),
        (256, 8192, 8192, 4.5, 3.0, True),
        (64, 4096, 4096, 0.56, 0.375, True),
        (8192, 256, 8192, 3.0, 3.0, False),
    )
)
"""The best is (q-1)/q^2 of the two tensors that move. Where k is the large size those two would have to be stored with
their k split by one and the same mesh axis; as they are stored, no rank off the diagonal holds what it multiplies."""


# -- blocks


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a model, with torch's MiB forward and backward, and the best that was known; None where not given."""

    name: str
    mesh: tuple[int, ...]
    tensors: Sequence[tuple[tuple[int, ...], str]]
    run: Callable[..., DTensor]
    torch_mib: tuple[float | None, float | None]
    best_mib: tuple[float | None, float | None]

    def measured(self) -> tuple[float, float, float, list[str]]:
        """MiB of inference, of forward and backward, and where gradients lie that do not lie like their tensors."""
        mesh = Mesh(self.mesh)
        with use_topology(BYTES):
            leaves = [tensor(mesh, shape, text) for shape, text in self.tensors]
            with trace() as inference:
                self.run(*leaves)
            for leaf in leaves[1:]:
                leaf.requires_grad_()
            leaves[0].requires_grad_(len(leaves) == 2)
            with trace() as forward:
                out = self.run(*leaves)
            with trace() as backward:
                out.backward(torch.ones_like(out))
        elsewhere = [f"{x.layout}" for x in leaves if x.grad is not None and x.grad.layout != x.layout]
        return mib(inference), mib(forward), mib(backward), elsewhere


def mlp(x: DTensor, w1: DTensor, w2: DTensor) -> DTensor:
    """Two products, and the result where the input lies."""
    return (F.gelu(x @ w1) @ w2).redistribute(placements=x.placements)


def residual(x: DTensor, w1: DTensor, w2: DTensor, scale: DTensor, shift: DTensor) -> DTensor:
    """The same with a residual connection and a layer norm."""
    y = x + F.gelu(x @ w1) @ w2
    return F.layer_norm(y, (y.shape[-1],), scale, shift).redistribute(placements=x.placements)


SQUARE, TOKENS = (1024, 1024), (8, 512, 1024)
WIDE, TALL = (1024, 4096), (4096, 1024)
BLOCKS = (
    Block("SUMMA", (4, 4), [(SQUARE, "S0 S1"), (SQUARE, "S0 S1")], torch.matmul, (1.5, 5.6), (1.5, 3.0)),
    Block(
        "MLP, batch split", (8,), [((8, 512, 1024), "S0"), (WIDE, "S1"), (TALL, "S0")], mlp, (129.5, None), (28.0, None)
    ),
    Block(
        "MLP, sequence split",
        (8,),
        [((8, 512, 1024), "S1"), (WIDE, "S1"), (TALL, "S0")],
        mlp,
        (28.0, None),
        (28.0, None),
    ),
    Block(
        "MLP, residual, norm",
        (8,),
        [(SQUARE, "S0"), (WIDE, "S1"), (TALL, "S0"), ((1024,), "R"), ((1024,), "R")],
        residual,
        (33.7, 61.7),
        (7.0, None),
    ),
    Block("ATP MLP", (4, 4), [(SQUARE, "R S1"), (WIDE, "S1 S0"), (TALL, "S0 S1")], mlp, (13.5, 11.2), (7.5, 6.0)),
    Block("ATP MLP", (2, 4), [(SQUARE, "R S1"), (WIDE, "S1 S0"), (TALL, "S0 S1")], mlp, (16.0, 18.8), (13.0, 12.0)),
    Block(
        "two products",
        (8,),
        [(SQUARE, "S1"), (SQUARE, "S0"), (SQUARE, "S1")],
        lambda x, a, b: ((x @ a) @ b).redistribute(placements=[Shard(1)]),
        (7.0, None),
        (7.0, None),
    ),
)


def product_rows(products: Sequence[Product]) -> list[list[str]]:
    """Cells for each product."""
    rows = []
    for each in products:
        moved, work = each.measured()
        m, k, n = each.sizes
        note = "*" if each.unattainable else ""
        rows.append(
            [
                each.name if each.result is None else f"{m}, {k}, {n}",
                str(each.mesh),
                f"[{each.a}] x [{each.b}]",
                f"{each.torch_mib:.3f}",
                f"{each.best_mib:.3f}{note}",
                f"{moved:.3f}",
                f"{work:.2f}",
            ]
        )
    return rows


def block_rows() -> list[list[str]]:
    """Cells for each block."""
    rows = []
    for each in BLOCKS:
        inference, forward, backward, elsewhere = each.measured()
        lie = "yes" if not elsewhere else ", ".join(elsewhere)
        steps = [_sum(each.torch_mib), _sum(each.best_mib), f"{forward:.1f} + {backward:.1f}"]
        alone = [_sum(each.torch_mib[:1]), _sum(each.best_mib[:1]), f"{inference:.1f}"]
        rows.append([each.name, str(each.mesh), *alone, *steps, lie])
    return rows


def _sum(parts: Sequence[float | None]) -> str:
    return "-" if None in parts else " + ".join(f"{part:.1f}" for part in parts)


def tables() -> str:
    """All tables as Markdown."""
    header = ["product", "mesh", "operands", "torch DTensor", "best known", "dshard", "FLOPs"]
    alone = ["torch DTensor, inference", "best known", "dshard"]
    steps = ["torch DTensor, step", "best known", "dshard"]
    return "\n\n".join(
        [
            "Products of 1024 x 1024 matrices, MiB received by the busiest rank until the result is not partial, fp32. "
            "FLOPs are those of all ranks over those of one device.",
            markdown_table(header, product_rows(PRODUCTS)),
            "Rectangles m, k, n with all three tensors laid out [S0 S1] on (4, 4).",
            markdown_table(header, product_rows(RECTANGLES)),
            "\\* Presumes another layout: the tensor that moves would have its k split by the mesh axis that splits "
            "the k of the other one. As it is stored, the ranks off the diagonal hold nothing of what they multiply.",
            "Blocks, MiB received by the busiest rank: without gradients, and forward + backward.",
            markdown_table(["block", "mesh", *alone, *steps, "gradients lie like their tensors"], block_rows()),
        ]
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the tables into docs/benchmarks.md")
    text = tables()
    print(text)
    if parser.parse_args().write:
        write_section("matmul-tables", text)
