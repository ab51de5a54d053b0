"""Operators: one family in each file, with its rules, its kernels, and its alternatives to the rules.

pointwise reductions views slicing concat indexing norms losses embedding convolution batched distances
grouped_matmul ragged histograms   tables of rules; lookup.py has kernels of indexed operators
matmul/              matmuls: chosen by loops, run whole or in panels, differentiated as matmuls
random/              random values that do not depend on the mesh
attention/           attention: loops b, h, q and k, merged partial results
experts/             experts: loops t, e and f, and the ragged exchange of tokens
fused_loss/          cross entropy of a linear layer, by chunks of rows
composite            torch functions of several operators, planned as one
scans exchange small_reductions   alternatives that need not gather a sharded dim
gradient_blocks      gradients of what was split or cut, in blocks where its parts are sharded
foreach decompositions custom   lists of tensors, `out=`, operators composed of others
optimiser_steps      how optimisers of distributed parameters step, and what they load
"""
