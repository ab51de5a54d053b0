"""What a distributed tensor is, and what every operator shares.

spec.py             layout, shape, stride, dtype and device: one interned value, so that caches compare by identity
context.py          what choices depend on beside their operands: the topology in use, with its caches
call.py             one call of an operator, as its rule sees it
operands.py         the mesh and the specs of a call's operands
moves.py            local tensors redistributed, local operators run on every rank
observe.py          decisions, told to `trace`, `explain` and `strict`
view_sync.py        views that do not share the memory of their base
plain_tensors.py    plain tensors among distributed ones
panel_cost.py       what a matmul takes in a number of panels
call_log.py         the operators that ran during a call, for the fast path
wrapper.py          the base class of DTensor: a local tensor and a spec
transforms.py       torch.func transforms and forward-mode derivatives
checks.py           what torch refuses on one device is refused before anything is sent
torch_function.py   calls of torch's functions: their arguments by name, autocast
provenance.py       the user's line and module
"""
