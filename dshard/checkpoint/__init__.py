"""Checkpoints independent of meshes: saved under any layout, loaded under any other, bit for bit.

Distributed tensors implement the protocol of torch.distributed.checkpoint, whose `save` and `load` accept them. `save`
and `load` here call those. They replace a checkpoint atomically, complete partial reductions, and compare the state
with the checkpoint before anything is read. See docs/checkpoint.md.

Design: docs/design/0008-checkpoint.md
"""

from dshard.checkpoint.store import load, save
from dshard.checkpoint.tensor_files import load_safetensors, save_safetensors

__all__ = ["load", "load_safetensors", "save", "save_safetensors"]
