"""Products of two distributed tensors, forward and backward from one plan.

A product is its rule; which loop each mesh axis takes is its strategy. The gradients of its operands are products, too,
of the same factors on the same axes, with the roles exchanged: what moved in one may be moved in another, and a tensor
gathered going forward is reduced going back. They are made by the same function, so second derivatives work.
"""

from dshard.product.decide import decide, is_leaf, wrapped
from dshard.product.decided import Product
from dshard.product.multiply import RERUNS, multiply

__all__ = ["RERUNS", "Product", "decide", "is_leaf", "multiply", "wrapped"]
