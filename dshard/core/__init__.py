"""The base class and spec of distributed tensors, and the machinery that all operators share.

spec.py             layout, shape, stride, dtype and device: one interned value, so that caches compare by identity
context.py          the topology on which choices are priced, with its caches
call.py             one call of an operator, as its rule sees it
operands.py         the mesh and the specs of a call's operands
alike_operators.py  operators without data that run once for all that are alike
executable.py       what a call runs as: redistribute, run the local operator, wrap
call_key.py         the key under which a call is cached
trees.py            leaves of nested tuples, lists and dicts
moves.py            redistribution of local tensors, also of several by one collective; local operators on every rank
owners.py           ranks that have some of a mesh's tensors whole for a while, and run functions of them
local_checks.py     checks of local and global tensors that become distributed, and their exchange between the ranks
local_work.py       seconds of the local work of an operator
observe.py          observers of decisions, calls and memory: for `trace`, `explain` and `strict`
view_sync.py        views with memory of their own, kept equal to their base
shared_memory.py    operands that share memory with what an in-place operator writes
plain_tensors.py    plain tensors among distributed ones, and what they are in the programs of a mesh
comparisons.py      comparisons of what must be alike on all ranks, beside backward passes
saved_files.py      distributed tensors in files of torch.save
replaced_parameters.py  parameters that distributed ones have replaced, of which each use is one of these
subclasses.py       classes of tensors that are plain data, or have rules of their own
wrapper.py          the base class of DTensor: a local tensor and a spec
torch_placements.py placements of classes that are torch's and dshard's
torch_tensors.py    distributed tensors of torch's own class as dshard's
torch_wrappers.py   torch's wrappers for data parallelism, refused where they would be wrong
transforms.py       torch.func transforms and forward-mode derivatives
checks.py           arguments that torch refuses, refused before anything is sent
torch_function.py   calls of torch's functions: their arguments by name, autocast
signature.py        types of functions and of their arguments
"""
