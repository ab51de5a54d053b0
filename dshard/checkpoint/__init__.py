"""Checkpoints that do not know the mesh that made them: saved under any layout, loaded under any other, bit for bit.

Distributed tensors speak the protocol of torch.distributed.checkpoint: its `save` and `load` take them as they are.
`save` and `load` here are thin fronts of these. They replace a checkpoint at once or not at all, complete partial
reductions, and compare what is asked with what is there before anything is read. See docs/checkpoint.md.
"""

from dshard.checkpoint.store import load, save
from dshard.checkpoint.tensor_files import load_safetensors, save_safetensors

__all__ = ["load", "load_safetensors", "save", "save_safetensors"]
