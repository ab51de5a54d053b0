"""A call, from torch's two entries to local operators and collectives.

fast_path.py         `__torch_function__`, warm: the call's key -> a shortcut
shortcuts.py         functions on the local tensors, made from the log of a call's first run
view_shortcuts.py    the same for views, which torch itself makes
logged_call.py       questions to that log
composite_table.py   `__torch_function__`, cold: functions that run as one composite operator
other_classes.py     `__torch_function__` with another class of tensors, which may have its own rules
numbers.py           results without dims, reduced when they are made
operator.py          `__torch_dispatch__`: the call's key -> its executable: redistribute, run, wrap
registry.py          the row of an operator in the families' tables
alternative.py       alternatives to an operator's rule, priced beside its strategies
composed_operators.py   operators that run as others, whatever their arguments
fallback.py          an operator without a rule: replicated operands, every rank computes all
"""
