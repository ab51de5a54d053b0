"""Plans of whole steps: the layouts of all tensors of a traced step chosen together.

eliminate.py      the least sum of tables over shared variables
step_graph.py     values, calls and blocks of a traced step
local_seconds.py  the seconds of a call by its own kernels
step_recorder.py  records the calls of a pass without data
"""
