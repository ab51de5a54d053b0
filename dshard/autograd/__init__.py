"""Where autograd crosses between distributed and local tensors, and between layouts.

crossing.py   ToLocal, FromLocal, Redistribute, Reshard: differentiable, to any order
hooks.py      what is asked of a tensor within the graph: its gradient, its node, its hooks
"""

from dshard.autograd.crossing import redistribute

__all__ = ["redistribute"]
