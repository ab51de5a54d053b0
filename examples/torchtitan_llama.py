"""torchtitan's Llama, laid out here: a TrainSpec for torchtitan's own trainer, loaders, optimisers and checkpoints.

PYTHONPATH=examples torchrun --nproc-per-node 8 -m torchtitan.train --experimental.custom_import torchtitan_llama \
    --model.name llama3_dshard --model.flavor debugmodel --parallelism.tensor_parallel_degree 2
python examples/torchtitan_llama.py       # prints the plan of that model on 8 ranks

Needs torchtitan, and triton, which torchtitan imports on CPUs, too.
"""

import sys
from dataclasses import replace

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from dshard import Mesh, parallelize, plan_model

try:
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.config import TORCH_DTYPE_MAP
    from torchtitan.models import llama3
    from torchtitan.protocols.train_spec import register_train_spec
except ImportError as missing:
    print(f"this example needs torchtitan and triton: {missing}")
    sys.exit()

STRATEGIES = {"dp_replicate": "data", "fsdp": "fsdp", "tp": "megatron"}
"""What each axis of torchtitan's meshes does here."""


def parallelize_llama(model, dims, config):
    """Lay out `model`, without data yet, on torchtitan's meshes: its `parallelize_fn`."""
    if dims.cp_enabled or dims.pp_enabled or dims.ep_enabled:
        raise ValueError("context, pipeline and expert parallel degrees are torchtitan's own: leave them at 1")
    axes = [axis for axis in STRATEGIES if dims.get_optional_mesh(axis) is not None]
    mesh = dims.get_mesh(axes) if axes else dims.world_mesh
    strategy = " x ".join(STRATEGIES[axis] for axis in axes) or "data"
    used, reduced = config.training.mixed_precision_param, config.training.mixed_precision_reduce
    precision = MixedPrecisionPolicy(param_dtype=TORCH_DTYPE_MAP[used], reduce_dtype=TORCH_DTYPE_MAP[reduced])
    rows = config.training.local_batch_size * dims.dp_replicate * dims.dp_shard
    tokens = torch.empty(rows, config.training.seq_len, dtype=torch.int64, device="meta")
    rows_of_each = {"inputs": "per-data-rank", "outputs": "plain"}
    parallelize(model, mesh, strategy, tokens, group=["layers.*"], precision=precision, **rows_of_each)
    if config.compile.enable:
        for block in model.layers.values():
            block.compile(backend=config.compile.backend)
    return model


def build_loss(config, parallel_dims, **_):
    """Sum over the rows of this rank. torchtitan divides it by the tokens of all ranks, and wants its gradients added.

    Those of plain rows are averaged over the data ranks, as by DDP; so the gradient is taken as often as there are.
    """
    ranks = parallel_dims.dp_replicate * parallel_dims.dp_shard

    def loss_of(logits, labels):
        loss = cross_entropy_loss(logits, labels)
        return loss + (ranks - 1) * (loss - loss.detach())

    return loss_of


theirs = llama3.get_train_spec()
SPEC = replace(theirs, parallelize_fn=parallelize_llama, build_loss_fn=build_loss, pipelining_fn=None)
register_train_spec("llama3_dshard", SPEC)


def main():
    with torch.device("meta"):
        model = llama3.Transformer(llama3.llama3_args["debugmodel"])
    tokens = torch.empty(32, 512, dtype=torch.int64, device="meta")
    print(plan_model(model, Mesh((4, 2), ("fsdp", "tp")), "fsdp x megatron", tokens))


if __name__ == "__main__":
    main()
