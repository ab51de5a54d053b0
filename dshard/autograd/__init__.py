"""Crossings of autograd between distributed and local tensors, and between layouts.

crossing.py           ToLocal, FromLocal, Redistribute, Reshard: differentiable, to any order
local_tensors.py      distributed tensors of the local tensors that ranks give, of which those outside a mesh have none
leaf_gradients.py     the hook that gives gradients of a leaf its own layout
gradients.py          torch.autograd.grad, backward and `data`, which distributed tensors answer themselves
joined_gradients.py   gradients of leaves reduced together, in buckets
gathered_weights.py   weights gathered together for a module, and their gradients
backward_graph.py     autograd's graph behind some nodes
"""

from dshard.autograd.crossing import redistribute

__all__ = ["redistribute"]
