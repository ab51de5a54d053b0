"""Lay out a Hugging Face GPT-2, random and small, on four ranks by the cheapest plan, and train it for a few steps.

python examples/parallelize_gpt2.py

Needs transformers. No line of the model is changed; each rank of a real job runs what `work` does.
"""

import os

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from dshard import Mesh, parallelize, plan_model
from dshard.testing import simulated

CONFIG = GPT2Config(n_layer=1, n_embd=32, n_head=4, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0)


def main() -> None:
    torch.manual_seed(0)
    model, tokens = GPT2LMHeadModel(CONFIG).eval(), torch.randint(0, 64, (8, 16))
    with torch.no_grad():
        expected = model(tokens).logits
    mesh = Mesh((2, 2), ("dp", "tp"))  # with processes: init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = plan_model(model, mesh, "megatron", tokens)
    print(plan)
    with simulated(mesh):  # all ranks in this process; without this line under torchrun
        parallelize(model, mesh, plan)
        with torch.no_grad():
            difference = (model(tokens).logits.full_tensor() - expected).abs().max()
        print(f"logits differ from those of one device by {float(difference.max()):.1e}")
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            loss = model(tokens, labels=tokens).loss
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
            print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
