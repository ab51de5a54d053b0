"""How long it takes to plan what was never planned before, in seconds of one process's CPU.

    python benchmarks/planning.py [--sample 500] [--products 20] [--write]
    python benchmarks/planning.py --steps [--ranks 4096] [--write]

Every cache is emptied before each plan, and Python's collector looks at what planning makes alone: a pass over all of
torch's objects, which takes longer than most plans, would fall on one or the other of them. Redistributions: a sample,
by a fixed seed, of all transitions between layouts of 4-D bfloat16 tensors on meshes of three axes. Products: fp32
operands whose layouts are drawn likewise, both with a gradient, on meshes of one to four axes of two ranks.
Explanations: all ways of one product. `--steps` plans the layouts of whole training steps of models of transformers:
to trace the step, to make the tables of its calls and moves, and to choose. `--write` puts the figures into
docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import platform
import random
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from math import prod
from typing import Any, TypeAlias

import torch
import transformers
from section import markdown_table, write_section
from torch import nn

from dshard.caches import clear_caches
from dshard.explain import explain_matmul
from dshard.layout import Layout
from dshard.mesh import Mesh
from dshard.ops.matmul.rules import matmul_rule
from dshard.parallel.trace_step import record_step
from dshard.placements import Partial, Placement, Replicate, Shard
from dshard.planning.plan_step import plan_step
from dshard.planning.step_tables import StepTables, Weights
from dshard.planning.uncollected import uncollected
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
Batch: TypeAlias = dict[str, Any]
STEPS_HEADER = (
    *("step", "mesh", "calls", "trace s", "tables s", "choice s", "all s"),
    *("moves of choices priced", "passes", "certificate"),
)
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


def gpt2() -> tuple[nn.Module, Batch]:
    """GPT-2 of 12 layers, on 8 x 1,024 tokens."""
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**off)), tokens(8, 1024)


def llama() -> tuple[nn.Module, Batch]:
    """Llama of 70 B parameters, 80 layers, on 256 x 4,096 tokens."""
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
    config = transformers.LlamaConfig(num_hidden_layers=80, **sizes)
    return transformers.LlamaForCausalLM(config).bfloat16(), tokens(256, 4096)


def t5() -> tuple[nn.Module, Batch]:
    """T5 of 12 and 12 layers, whose embeddings are tied, on 64 x 512 tokens."""
    sizes = {"d_model": 1024, "d_ff": 4096, "d_kv": 64, "num_heads": 16, "num_layers": 12, "num_decoder_layers": 12}
    config = transformers.T5Config(decoder_start_token_id=0, dropout_rate=0.0, **sizes)
    return transformers.T5ForConditionalGeneration(config).bfloat16(), tokens(64, 512)


def tokens(rows: int, length: int) -> Batch:
    """Token ids without data, which are their own labels."""
    ids = torch.zeros(rows, length, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}


STEPS: tuple[tuple[str, Callable[[], tuple[nn.Module, Batch]], tuple[int, ...], Weights], ...] = (
    ("GPT-2, 12 layers", gpt2, (8,), Weights()),
    ("GPT-2, 12 layers", gpt2, (2, 4), Weights()),
    ("GPT-2, 12 layers", gpt2, (2, 2, 2), Weights()),
    ("GPT-2, 12 layers, a byte has a price", gpt2, (2, 4), Weights(memory=1e-12)),
    ("T5, 12 + 12 layers, tied", t5, (2, 4), Weights()),
    ("T5, 12 + 12 layers, tied", t5, (2, 2, 2), Weights()),
    ("Llama 70 B, 80 layers", llama, (8, 8), Weights()),
    ("Llama 70 B, 80 layers", llama, (8, 8, 64), Weights()),
)


def steps(ranks: int) -> Iterator[list[str]]:
    """One row for each model and mesh of at most so many ranks, on hosts of 8 H100s."""
    for name, build, shape, weights in [step for step in STEPS if prod(step[2]) <= ranks]:
        with torch.device("meta"):
            model, batch = build()
        mesh = Mesh(shape)
        topology = Topology.preset("dgx-h100", nodes=max(1, mesh.size // 8))
        clear_caches()
        with uncollected():
            times = [time.process_time()]
            graph = record_step(model, (), batch).graph().copies()
            times.append(time.process_time())
            tables = StepTables(graph, mesh, topology)
            times.append(time.process_time())
            chosen = plan_step(tables, weights)
            times.append(time.process_time())
        seconds = [f"{after - before:.2f}" for before, after in pairwise(times)]
        figures = (f"{times[-1] - times[0]:.2f}", str(chosen.prices), str(chosen.passes), f"{chosen.certificate:.4f}")
        yield [name, str(mesh), str(len(graph.calls)), *seconds, *figures]


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
    parser.add_argument("--steps", action="store_true", help="plan whole training steps instead")
    parser.add_argument("--ranks", type=int, default=4096, help="of steps, on meshes of at most so many ranks")
    args = parser.parse_args()
    gc.collect()
    gc.freeze()
    rows = (
        steps(args.ranks) if args.steps else (*redistributions(args.sample), *products(args.products), *explanations())
    )
    table = markdown_table(STEPS_HEADER if args.steps else HEADER, list(rows))
    where = f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}"
    print(table)
    if args.write:
        options = (
            f"--steps --ranks {args.ranks}" if args.steps else f"--sample {args.sample} --products {args.products}"
        )
        text = f"`benchmarks/planning.py {options}`, {where}"
        write_section("planning of steps" if args.steps else "planning", f"{text}, {datetime.date.today()}.\n\n{table}")


if __name__ == "__main__":
    main()
