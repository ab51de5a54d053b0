"""One operator: notation -> expansions -> priced strategies; the loops of matmuls and attention. Pure values, no torch.

rule.py                 an operator by the factors in each dim of its tensors
rule_notation.py        the notation of rules, "m k, k n -> m n"
expand.py               a rule on a mesh: each mesh axis takes at most one factor; the layouts of all operands
strategy.py             strategies as values, and constraints on them
strategy_price.py       prices of expansions: redistributions, local work
strategy_choice.py      the cheapest strategy, by branch and bound
reshape.py              the rule of a reshape, from its shapes
matmul_loops.py         matmuls: a loop m, n or k for each mesh axis, all schedules in closed form, named ones
cut_factors.py          factors cut in several: by the levels at which operands shard them, or in blocks
panel_stream.py, panel_cut.py   matmuls in panels: which factor is cut, and where
communication_bounds.py  lower bounds on the communication of matmuls, of attention and of layers of experts
named_loops.py          rows of the tables of named loops
expert_loops.py         experts: a loop t, e or f for each mesh axis
attention_loops.py      attention: a loop b, h, q or k for each mesh axis
attention_blocks.py     blocks of the scores of which a rank has queries and keys
attention_ring.py       the panels of keys and values that go round a ring

Design: docs/design/0002-rules-strategies-dispatch.md
"""
