"""Plans of whole steps: the layouts of all tensors of a traced step chosen together.

step_graph.py       calls of operators with their rules, and the values between them
step_recorder.py    records them while a model runs without data
local_seconds.py    seconds of a call's local work: of its own kernels, or as the executor runs it
kept_values.py      what stays in memory until the backward pass
call_candidates.py  the ways in which a call may run: expansions of its rule over all rows of every mesh axis
move_prices.py      seconds of redistributions between the layouts of one tensor, bounded until they are priced
step_tables.py      the tables of a step: work of calls, moves between them, uses of parameters
eliminate.py        the least sum of tables over shared variables
deadline.py         when a search ends
plan_step.py        the choice of the least sum, and a bound
"""
