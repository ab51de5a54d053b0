"""What torch.compile needs of dshard: how a tensor is taken apart, what is guarded, what it does not look into."""

from dshard.tracing.flat import Flat, flat, numbers
from dshard.tracing.fronts import traceable, unseen

__all__ = ["Flat", "flat", "numbers", "traceable", "unseen"]
