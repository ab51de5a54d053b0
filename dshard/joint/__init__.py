"""Composite operators caught whole, above autograd: products, attention, and what completes a pending operand."""

from dshard.joint.doors import JOINT
from dshard.joint.products import linear, matmul
from dshard.joint.run import run_strategy

__all__ = ["JOINT", "linear", "matmul", "run_strategy"]
