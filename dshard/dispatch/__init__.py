"""A call, from torch's two entries to local operators and collectives.

torch_calls.py     `__torch_function__`: by a handler, as a composite operator, or as the operators that torch runs
planned_calls.py   calls of a model whose plan has their layouts: operands, results and strategies follow it
function_table.py  the functions of torch that do not simply run as its operators, each with its row and handler
operator.py        `__torch_dispatch__`: the call's key -> its executable; without a rule every rank computes all
registry.py        the row of an operator in the families' tables, and operators that run as others

Design: docs/design/0012-the-path-of-a-call.md
"""
