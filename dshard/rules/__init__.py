"""One operator: notation -> expansions -> priced strategies, and the loops of matmuls. Pure values, no torch.

rule.py                 the notation: an operator by the factors of its tensors, "m k, k n -> m n"
expand.py               a rule on a mesh: each mesh axis takes at most one factor; the layouts of all operands
strategy.py             expansions priced, the cheapest chosen
reshape.py              the rule of a reshape, from its shapes
matmul_loops.py         matmuls: a loop m, n or k for each mesh axis, all schedules in closed form
matmul_strategies.py    named schedules
split_contraction.py    a contraction dim whose operands are sharded at different levels
panel_stream.py, panel_cut.py   matmuls in panels: which factor is cut, and where
matmul_bound.py         a lower bound on the communication of a matmul
"""
