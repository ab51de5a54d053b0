"""Matmuls: chosen by loops, run whole or in panels, differentiated as matmuls of the same factors.

functions.py           torch's functions that are matmuls, and the strategy of a call: asked for, or the cheapest
options.py             what the caller asked for: a strategy, a layout of the result, panels
rules.py               their rules
matmul_executable.py   a chosen strategy as an executable, its panels, and the matmuls of its gradients
matmul_autograd.py     forward and backward
local.py               the kernel that fits the terms
panel_executor.py ring.py panel_price.py   in panels: gathered, broadcast or around rings
"""
