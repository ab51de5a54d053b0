"""The placements, by the name of torch's module of them."""

from dshard.core.torch_placements import Partial, Placement, Replicate, Shard

__all__ = ["Partial", "Placement", "Replicate", "Shard"]
