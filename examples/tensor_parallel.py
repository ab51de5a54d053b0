"""A Llama-style model with tensor, sequence and loss parallelism, as written for torch.distributed.tensor.parallel.

Only the imports from dshard differ from a program for torch's own DTensor: python examples/tensor_parallel.py
"""

import os
import tempfile

import torch
import torch.nn.functional as F
from torch import nn

from dshard import Replicate, Shard, init_device_mesh
from dshard.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel

from dshard.parallel import loss_parallel, parallelize_module  # isort: skip

WORDS, WIDTH, HEADS, RANKS = 64, 32, 4, 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = HEADS
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x, turn):
        q, k, v = (w(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = F.scaled_dot_product_attention(rotated(q, turn), rotated(k, turn), v, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))


def rotated(x, turn):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * turn.cos() - b * turn.sin(), a * turn.sin() + b * turn.cos()], dim=-1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.attention, self.ffn_norm = nn.RMSNorm(WIDTH), Attention(), nn.RMSNorm(WIDTH)
        self.w1, self.w3 = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.w2 = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x, turn):
        x = x + self.attention(self.attention_norm(x), turn)
        y = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings, self.norm, self.output = nn.Embedding(WORDS, WIDTH), nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens):
        rates = 100 ** -torch.linspace(0, 1, WIDTH // HEADS // 2, dtype=torch.get_default_dtype())
        turn, x = torch.arange(tokens.shape[1])[:, None] * rates, self.embeddings(tokens)
        for layer in self.layers:
            x = layer(x, turn)
        return self.output(self.norm(x))


def parallelize(model, mesh):
    for layer in model.layers:
        layer.attention.heads //= mesh.size()
    plan = {name: SequenceParallel() for name in ("norm", "layers.*.attention_norm")}
    plan["layers.*.ffn_norm"] = SequenceParallel(use_local_output=False)
    plan |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("layers.*.attention.wo", "layers.*.w2")}
    plan |= {f"layers.*.attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
    plan |= {f"layers.*.{name}": ColwiseParallel(input_layouts=Shard(1)) for name in ("w1", "w3")}
    plan["layers.*.attention"] = PrepareModuleInput(
        input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
    )
    plan["embeddings"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    plan["output"] = ColwiseParallel(input_layouts=Shard(1), use_local_output=False)
    return parallelize_module(model, mesh, plan)


def train(mesh=None, steps=5):
    torch.manual_seed(0)  # the same parameters and data on every rank
    model, tokens = Transformer(), torch.randint(WORDS, (steps, 4, 17))
    model = parallelize(model, mesh) if mesh else model
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for batch in tokens:
        with loss_parallel():
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append((loss.full_tensor() if mesh else loss).item())
    return losses


def main(rank, store):
    torch.distributed.init_process_group("gloo", store, rank=rank, world_size=RANKS)
    losses = train(init_device_mesh("cpu", (RANKS,)))
    if rank == 0:
        print("on", RANKS, "ranks:", losses, "\nalone:     ", train())
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        raise SystemExit("this example starts its own ranks: run it by python, not by torchrun")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(main, (f"file://{folder}/store",), RANKS)
