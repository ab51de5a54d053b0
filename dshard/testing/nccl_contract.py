"""A process group that behaves as NCCL, on CPU tensors and without a GPU: see `dshard.tools.nccl_contract`."""

from dshard.tools.nccl_contract import BACKEND, RULES, NcclContract, Rule, Usage, register, usage

__all__ = ["BACKEND", "RULES", "NcclContract", "Rule", "Usage", "register", "usage"]
