"""Teach dshard an operator of your own in one line, and verify the line by brute force.

python examples/custom_op.py
"""

import torch

from dshard import register_rule
from dshard.testing import check_rule


@torch.library.custom_op("example::gated", mutates_args=())
def gated(x: torch.Tensor, value: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Tokens through a gated layer without a second product: x value * sigmoid(x gate)."""
    return (x @ value) * torch.sigmoid(x @ gate)


@gated.register_fake
def _(x: torch.Tensor, value: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], value.shape[1])


def main() -> None:
    register_rule("example::gated", "t [h], [h] f, [h] f -> t f")
    sample = (torch.randn(5, 4, dtype=torch.float64), *(torch.randn(4, 6, dtype=torch.float64) for _ in range(2)))
    check_rule("example::gated", sample, gradients=False)
    print("tokens and features may be split; every layout gives what one device gives")


if __name__ == "__main__":
    main()
