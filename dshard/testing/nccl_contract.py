"""A process group that behaves as NCCL, on CPU tensors and without a GPU: see `dshard.tools.nccl_contract`."""

from dshard.tools.nccl_contract import BACKEND, RULES, Clause, NcclContract, Usage, register, usage

__all__ = ["BACKEND", "RULES", "Clause", "NcclContract", "Usage", "register", "usage"]
