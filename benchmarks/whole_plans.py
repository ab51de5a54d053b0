"""Plans that choose all layouts of a step together, beside the best strategy by name, by the price of the traced step.

    python benchmarks/whole_plans.py [--ranks 8 64 512] [--models gpt llama ...] [--write]

Models without data, of two blocks, on meshes without processes; nothing runs. Each row is a model on a preset: the step
of "auto", the cheapest of the names, how many times that takes, what was found, the certificate of the plan, and the
seconds of CPU that "auto" took with nothing remembered. `--write` puts the table into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from section import markdown_table, write_section
from torch import Tensor, nn

from dshard import Layout, Mesh, StrategyError, Topology, plan_model, use_topology
from dshard.caches import clear_caches
from dshard.parallel import Auto, ModelPlan

NAMES = {
    1: ("data", "fsdp", "megatron", "megatron-sp", "context", "ulysses", "expert"),
    2: (
        *("data x data", "data x fsdp", "fsdp x fsdp", "data x megatron", "data x megatron-sp", "fsdp x megatron"),
        *(
            "fsdp x megatron-sp",
            "data x context",
            "data x ulysses",
            "fsdp x context",
            "optimus",
            "atp",
            "fsdp x expert",
        ),
    ),
}
ROWS = 8
SECONDS = 60
"""Of the processor, for each search, six times the default: on more ranks some of three axes end there."""
HEADER = ("model", "preset", "mesh", "auto, ms", "best name", "ms", "name / auto", "found", "certificate", "CPU s")


class Adapted(nn.Module):
    """Linear layers that are not trained, each with a low-rank adapter that is."""

    def __init__(self, width: int, inner: int, rank: int) -> None:
        super().__init__()
        sizes = ((width, inner), (inner, width))
        self.base = nn.ModuleList(nn.Linear(*size, bias=False).requires_grad_(False) for size in sizes)
        self.a = nn.ModuleList(nn.Linear(size[0], rank, bias=False) for size in sizes)
        self.b = nn.ModuleList(nn.Linear(rank, size[1], bias=False) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        up, down = (lambda x, i=i: self.base[i](x) + self.b[i](self.a[i](x)) for i in range(2))
        out: Tensor = x + down(F.gelu(up(x)))
        return out


def tokens(rows: int, length: int) -> dict[str, Tensor]:
    ids = torch.zeros(rows, length, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}


def transformer(kind: str, head: str, **sizes: Any) -> nn.Module:
    """A model of transformers, whose drop-outs are off."""
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model: nn.Module = getattr(transformers, head)(config)
    return model.bfloat16()


def gpt(rows: int) -> tuple[nn.Module, dict[str, Tensor]]:
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return transformer("GPT2", "GPT2LMHeadModel", n_layer=2, n_embd=2048, n_head=16, **off), tokens(rows, 1024)


def llama(rows: int) -> tuple[nn.Module, dict[str, Tensor]]:
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    return transformer("Llama", "LlamaForCausalLM", num_hidden_layers=2, **sizes), tokens(rows, 4096)


def vit(rows: int) -> tuple[nn.Module, dict[str, Tensor]]:
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_labels": 1000}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = transformer("ViT", "ViTForImageClassification", num_hidden_layers=2, **sizes, **off)
    images = torch.empty(8 * rows, 3, 224, 224, device="meta", dtype=torch.bfloat16)
    return model, {"pixel_values": images, "labels": torch.zeros(8 * rows, dtype=torch.long, device="meta")}


def t5(rows: int) -> tuple[nn.Module, dict[str, Tensor]]:
    sizes = {"d_model": 1024, "d_ff": 4096, "d_kv": 64, "num_heads": 16, "num_layers": 2, "num_decoder_layers": 2}
    model = transformer("T5", "T5ForConditionalGeneration", decoder_start_token_id=0, dropout_rate=0.0, **sizes)
    return model, tokens(rows, 512)


def mixtral(rows: int) -> tuple[nn.Module, dict[str, Tensor]]:
    sizes = {"hidden_size": 2048, "intermediate_size": 7168, "num_attention_heads": 32, "num_key_value_heads": 8}
    return transformer("Mixtral", "MixtralForCausalLM", num_hidden_layers=2, **sizes), tokens(rows, 2048)


def lora(rows: int) -> tuple[nn.Module, dict[str, Tensor]]:
    return Adapted(4096, 16384, 16).bfloat16(), {"x": torch.empty(512 * rows, 4096, dtype=torch.bfloat16)}


MODELS: dict[str, Callable[[int], tuple[nn.Module, dict[str, Tensor]]]] = {
    "gpt": gpt,
    "llama": llama,
    "vit": vit,
    "t5": t5,
    "mixtral": mixtral,
    "lora": lora,
}


def settings(ranks: list[int]) -> Iterator[tuple[str, Topology, Mesh]]:
    """The presets, and on each the meshes that are tried: hosts and the ranks of one, or these in two axes."""
    for n in ranks:
        for preset in ("dgx-h100", "dgx-a100", "cpu"):
            if preset != "cpu":
                shape = (n // 8, 8) if n > 8 else (2, 4)
                yield preset, Topology.preset(preset, nodes=max(1, n // 8)), Mesh(shape, ("x", "y"))
            elif n == 8:
                yield preset, Topology.preset(preset), Mesh((8,), ("x",))


def found(plan: ModelPlan) -> str:
    """The layouts of parameters that most of them have."""
    layouts = Counter(str(Layout(plan.mesh, placements)) for placements in plan.parameters.values())
    name = "" if plan.strategy == "planned" else f"{plan.strategy}: "
    return name + ", ".join(f"{times} {layout}" for layout, times in layouts.most_common(3))


def named(model: nn.Module, mesh: Mesh, name: str, batch: dict[str, Tensor]) -> ModelPlan | None:
    """The plan of a name; None where the model or the mesh cannot use it."""
    with suppress(StrategyError):
        return plan_model(model, mesh, name, **batch)
    return None


def row(model: str, preset: str, topology: Topology, mesh: Mesh) -> list[str]:
    """A model on one topology."""
    warnings.simplefilter("ignore")
    with torch.device("meta"):
        built, batch = MODELS[model](ROWS)
    clear_caches()
    begin = time.process_time()
    with use_topology(topology):
        auto = plan_model(built, mesh, Auto(seconds=SECONDS), **batch)
        seconds = time.process_time() - begin
        plans = [named(built, mesh, name, batch) for name in NAMES[mesh.ndim]]
    best = min([plan for plan in plans if plan is not None], key=lambda plan: plan.cost.seconds)
    return [
        *(model, preset, str(mesh), f"{auto.cost.seconds * 1e3:.3f}", best.strategy, f"{best.cost.seconds * 1e3:.3f}"),
        f"{best.cost.seconds / auto.cost.seconds:.2f}",
        *(found(auto), "" if auto.certificate is None else f"{auto.certificate:.3f}", f"{seconds:.1f}"),
    ]


def main() -> None:
    """ModelPlan, print, and write if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--jobs", type=int, default=2, help="rows at once")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    table = []
    with ProcessPoolExecutor(args.jobs) as pool:
        asked = [(model, *setting) for model in args.models for setting in settings(args.ranks)]
        for cells in pool.map(row, *zip(*asked, strict=True)):
            table.append(cells)
            print(" | ".join(cells), flush=True)
    text = markdown_table(HEADER, table)
    if args.write:
        ranks = " ".join(map(str, args.ranks))
        write_section(
            "whole plans", f"`benchmarks/whole_plans.py --ranks {ranks}`, torch {torch.__version__}.\n\n{text}"
        )


if __name__ == "__main__":
    main()
