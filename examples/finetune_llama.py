"""Fine-tune a Llama of Hugging Face: load a checkpoint onto the mesh, train, save, generate.

torchrun --nproc-per-node 4 examples/finetune_llama.py --mesh 2 2 --strategy "fsdp x megatron"
torchrun --nproc-per-node 4 examples/finetune_llama.py --mesh 4 --strategy fsdp --trainer    # transformers' own loop
python examples/finetune_llama.py                                                            # the same on one device

Needs transformers, and accelerate for its Trainer. The checkpoint is a tiny, random one that this program writes first;
give the folder of yours with --model.
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import dshard
from dshard.parallel import from_pretrained

WORDS, LENGTH, BATCH = 32, 12, 16


def write_tiny_model(folder):
    sizes = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    torch.manual_seed(0)
    config = LlamaConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, bos_token_id=0, eos_token_id=1, pad_token_id=1
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def examples_of(rows):
    """Sequences that count on from a random number, as a Trainer's dataset: dicts of tensors."""
    first = torch.randint(2, WORDS, (rows, 1), generator=torch.Generator().manual_seed(1))
    tokens = (first - 2 + torch.arange(LENGTH)) % (WORDS - 2) + 2
    return [{"input_ids": row, "labels": row} for row in tokens]


def loop(model, data, epochs):
    ranks, rank = dshard.data_ranks(model)
    sampler = DistributedSampler(data, ranks, rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for batch in DataLoader(data, BATCH // ranks, sampler=sampler):
            loss = model(**batch).loss  # the mean over the rows of all ranks
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        loss = loss.item()  # all ranks ask for it, one prints
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss:.3f}", flush=True)


def with_trainer(model, data, epochs, folder):
    rows = BATCH // dshard.data_ranks(model)[0]
    settings = {"learning_rate": 1e-2, "lr_scheduler_type": "constant", "use_cpu": model.device.type == "cpu"}
    quiet = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "logging_strategy": "epoch"}
    arguments = TrainingArguments(
        folder, num_train_epochs=epochs, per_device_train_batch_size=rows, **settings, **quiet
    )
    Trainer(model, arguments, train_dataset=data).train()


def main(options):
    names = tuple(f"axis{i}" for i in range(len(options.mesh)))
    mesh = dshard.init_device_mesh(options.device, tuple(options.mesh), mesh_dim_names=names)
    source = options.model or f"{options.folder}/tiny"
    if options.model is None and dist.get_rank() == 0:
        write_tiny_model(source)
    dist.barrier()
    example = {"input_ids": torch.zeros(BATCH, LENGTH, dtype=torch.int64)}
    rows = {"inputs": "per-data-rank"}
    model = from_pretrained(AutoModelForCausalLM, source, mesh, options.strategy, example=example, **rows)
    data = examples_of(64)
    if options.trainer:
        with_trainer(model, data, options.epochs, options.folder)
    else:
        loop(model, data, options.epochs)
    tuned = Path(options.folder) / "tuned"
    model.save_pretrained(tuned)  # all ranks call it, the first writes a whole checkpoint
    prompt = torch.tensor([[2, 3, 4]])
    ask = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 6, "do_sample": False}
    tokens = model.eval().generate(prompt, **ask)
    if dist.get_rank() == 0:
        print("continued", *tokens[0].tolist())
        alone = AutoModelForCausalLM.from_pretrained(tuned)  # plain transformers, on one device
        again = alone.generate(prompt, **ask)
        print("plain transformers continues alike:", torch.equal(again, tokens))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mesh", type=int, nargs="+", default=[1])
    parser.add_argument("--strategy", default="data")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--trainer", action="store_true")
    parser.add_argument("--model")
    parser.add_argument("--folder", default="/tmp/dshard-finetune")
    parser.add_argument("--device", default="cpu")
    main(parser.parse_args())
