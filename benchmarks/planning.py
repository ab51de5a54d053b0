"""How long it takes to plan what was never planned before, in seconds of one process's CPU.

    python benchmarks/planning.py [--sample 500] [--products 20] [--write]

Every cache is emptied before each plan, and Python's collector looks at what planning makes alone: a pass over all of
torch's objects, which takes longer than most plans, would fall on one or the other of them. Redistributions: a sample,
by a fixed seed, of all transitions between layouts of 4-D bfloat16 tensors on meshes of three axes. Products: fp32
operands whose layouts are drawn likewise, both with a gradient, on meshes of one to four axes of two ranks.
Explanations: all ways of one product. `--write` puts the figures into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import platform
import random
import time
from collections.abc import Callable, Iterator

import torch
from section import markdown_table, write_section

from dshard.caches import clear_caches
from dshard.explain import explain_matmul
from dshard.layout import Layout
from dshard.mesh import Mesh
from dshard.ops.matmul.rules import matmul_rule
from dshard.placements import Partial, Placement, Replicate, Shard
from dshard.redistribute import plan
from dshard.rules.expand import Operand
from dshard.rules.strategy import Constraints, Question
from dshard.rules.strategy_choice import choose
from dshard.topology import Topology

MESHES = (
    (Mesh((2, 4, 2), ("a", "b", "c")), "cpu", Topology.preset("cpu")),
    (Mesh((4, 8, 2), ("a", "b", "c")), "dgx-h100, 8 hosts", Topology.preset("dgx-h100", nodes=8)),
)
TENSORS = ((8, 128, 16, 64), (32, 4096, 32, 128), (7, 5, 3, 2))
M, K, N = 512, 1024, 2048
HEADER = ("cold", "topology", "count", "median ms", "99th percentile ms", "most ms")


def cold(run: Callable[[], object]) -> float:
    """Seconds of CPU of `run` with nothing remembered."""
    clear_caches()
    start = time.process_time()
    run()
    return time.process_time() - start


def drawn(mesh: Mesh, placements: list[Placement], chance: random.Random) -> Layout:
    """A layout with any of these placements on each mesh axis."""
    return Layout(mesh, tuple(chance.choice(placements) for _ in mesh.shape))


def redistributions(count: int) -> Iterator[list[str]]:
    """One row for each mesh."""
    chance = random.Random(0)
    placements = [Replicate(), Partial(), *map(Shard, range(4))]
    for mesh, name, topology in MESHES:
        seconds = []
        for i in range(count):
            src, dst = drawn(mesh, placements, chance), drawn(mesh, placements, chance)
            shape = TENSORS[i % len(TENSORS)]
            seconds.append(cold(lambda src=src, dst=dst, shape=shape, at=topology: plan(src, dst, shape, 2, at)))
        yield row(f"redistribution, 4-D, {mesh}", name, seconds)


def products(count: int) -> Iterator[list[str]]:
    """One row for each number of mesh axes and topology."""
    rule, constraints = matmul_rule((M, K), (K, N)), Constraints(gradients=(True, True), kept=(True, True))
    placements = [Replicate(), Shard(0), Shard(1)]
    for axes in range(1, 5):
        mesh, chance = Mesh((2,) * axes), random.Random(axes)
        for name, topology in (("cpu", Topology.preset("cpu")), ("dgx-h100, 2 hosts", Topology.preset("dgx-h100", 2))):
            seconds = []
            for _ in range(count):
                a, b = (drawn(mesh, placements, chance) for _ in range(2))
                operands = (Operand(a, (M, K), 4), Operand(b, (K, N), 4))
                question = Question(rule, operands, (((M, N), 4),), topology, constraints)
                seconds.append(cold(lambda question=question: choose(question)))
            yield row(f"choice for mm with gradients, {axes} mesh axes", name, seconds)


def explanations() -> Iterator[list[str]]:
    """One row for each mesh."""
    for axes in (2, 3, 4):
        mesh, topology = Mesh((8,) * axes), Topology.preset("dgx-h100", 8 ** (axes - 1))
        seconds = cold(lambda mesh=mesh, at=topology: explain_matmul(8192, 8192, 32768, mesh, at))
        yield row(f"explanation of all {10**axes:,} ways of a product, {axes} mesh axes", "dgx-h100", [seconds])


def row(what: str, topology: str, seconds: list[float]) -> list[str]:
    """The figures of one kind of plan."""
    ordered = sorted(seconds)
    figures = (ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100], ordered[-1])
    return [what, topology, str(len(ordered)), *(f"{figure * 1e3:.1f}" for figure in figures)]


def main() -> None:
    """Measure, print, and write if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=500)
    parser.add_argument("--products", type=int, default=20)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    gc.collect()
    gc.freeze()
    table = markdown_table(HEADER, [*redistributions(args.sample), *products(args.products), *explanations()])
    where = f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}"
    print(table)
    if args.write:
        text = f"`benchmarks/planning.py --sample {args.sample} --products {args.products}`, {where}"
        write_section("planning", f"{text}, {datetime.date.today()}.\n\n{table}")


if __name__ == "__main__":
    main()
