"""Predicted training steps beside throughputs that others published, of public models.

    python benchmarks/published.py [--write]

Models of transformers without data, priced as `dshard plan model` prices them; nothing runs. A step is a forward and a
backward pass in bfloat16 over weights, gradients and moments in single precision, under FSDP on all devices. `--write`
puts the table into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import torch
from section import markdown_table, write_section

from dshard import Topology
from dshard.parallel import Precision
from dshard.parallel.integrations.config_models import model_of_config
from dshard.parallel.plan_table import plan_table
from dshard.topology.presets import EFFICIENCY

LLAMA2_7B = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "vocab_size": 32000}
LLAMA3_8B = {
    **LLAMA2_7B,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
}
LLAMA3_70B = {
    **LLAMA3_8B,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}


class Published(NamedTuple):
    """A published training run: tokens a second of one device, what it recomputed, and where it is told."""

    model: str
    config: dict[str, Any]
    preset: str
    devices: int
    sequences: int  # of one device
    length: int
    recomputed: str
    throughput: float
    source: str


DECEMBER = (
    "[torchtitan, 2024-12](https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md)"
)
PERFORMANCE = "[torchtitan, 2024-07](https://github.com/pytorch/torchtitan/blob/main/docs/performance.md)"
FSDP = "[IBM and PyTorch, 2024-03](https://pytorch.org/blog/maximizing-training/)"
RUNS = (
    Published("Llama 3.1 8B", LLAMA3_8B, "dgx-h100", 8, 2, 8192, "some operators", 5762, f"{DECEMBER}, table 1"),
    Published("Llama 3.1 8B", LLAMA3_8B, "dgx-h100", 128, 2, 8192, "some operators", 5605, f"{DECEMBER}, table 3"),
    Published("Llama 3 8B", LLAMA3_8B, "dgx-a100", 64, 1, 8192, "some operators", 2973, PERFORMANCE),
    Published("Llama 3 70B", LLAMA3_70B, "dgx-a100", 64, 1, 8192, "each block", 331, PERFORMANCE),
    Published("Llama 2 7B", LLAMA2_7B, "dgx-a100", 128, 2, 4096, "nothing", 3700, FSDP),
)
HEADER = ("model", "devices", "recomputed", "published, tokens/s", "predicted", "predicted / published")


def row(run: Published) -> list[str]:
    """The cells of a published run, and its prediction."""
    model = model_of_config({"model_type": "llama", "max_position_embeddings": run.length, **run.config})
    if run.recomputed == "each block":
        model.gradient_checkpointing_enable()
    tokens = torch.empty(run.devices * run.sequences, run.length, dtype=torch.long, device="meta")
    topology = Topology.preset(run.preset, nodes=run.devices // 8)
    table = plan_table(
        model,
        run.devices,
        topology,
        (),
        {"input_ids": tokens, "labels": tokens},
        strategies=["fsdp"],
        memory=None,
        precision=Precision(torch.bfloat16, torch.float32),
        efficiency=EFFICIENCY[topology.device.name][0],
        dtype="bfloat16",
    )
    plan = table.plans[0].plan
    predicted = run.sequences * run.length / plan.cost.seconds
    return [
        *(
            f"[{run.model}]({run.source.partition('(')[2].partition(')')[0]})",
            f"{run.devices} {run.preset[4:].upper()}",
        ),
        *(run.recomputed, f"{run.throughput:,.0f}", f"{predicted:,.0f}", f"{predicted / run.throughput:.2f}"),
    ]


def main() -> None:
    """Predict, print, and write if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    table = []
    for run in RUNS:
        table.append(row(run))
        print(" | ".join(table[-1]), flush=True)
    if args.write:
        write_section("published", f"`benchmarks/published.py`.\n\n{markdown_table(HEADER, table)}")


if __name__ == "__main__":
    main()
