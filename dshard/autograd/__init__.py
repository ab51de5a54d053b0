"""Crossings of autograd between distributed and local tensors, and between layouts.

crossing.py   ToLocal, FromLocal, Redistribute, Reshard: differentiable, to any order
hooks.py      gradients, nodes and hooks of tensors that were recorded on local tensors
"""

from dshard.autograd.crossing import redistribute

__all__ = ["redistribute"]
