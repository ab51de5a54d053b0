"""One call: from torch's two entries to local operators and collectives.

fast_path.py         `__torch_function__`, warm: the call's key -> a function on the local tensors
recorded_path.py     the same, recorded by torch's autograd on the local tensors
composite_table.py   `__torch_function__`, cold: functions that are planned jointly
operator.py          `__torch_dispatch__`: the call's key -> its executable: redistribute, run, wrap
registry.py          which rule, or which other way, an operator has
fallback.py          an operator without a rule: replicated operands, every rank computes all
"""
