"""Programs around the library, which imports none of them: the command line, reports, measurements and test backends.

`cli` is the command `dshard`, `report` draws, `demo` trains under several layouts, `selftest` checks a machine,
`calibrate` measures its network, `torch_debug` has torch's debugging helpers, and `nccl_contract` is a process group on
CPU tensors that keeps NCCL's contract. What programs use of them has a public address: `dshard.report`,
`dshard.calibrate`, `dshard.selftest`, `dshard.debug` and `dshard.testing.nccl_contract`.
"""
