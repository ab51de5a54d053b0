"""Matmuls: chosen by loops, run whole or in panels, differentiated as matmuls of the same factors.

functions.py           torch's functions that are matmuls, the strategy of a call, and its node of autograd
options.py             the caller's options: a strategy, a layout of the result, panels
rules.py               the rules of these functions
matmul_executable.py   a chosen strategy as an executable, its panels, and the matmuls of its gradients
local.py               the torch kernel for the dims of the local operands
panel_executor.py ring.py symmetric.py panel_price.py   matmuls in panels: gathered, broadcast, around rings, or in
                       kernels that read other GPUs' memory
"""
