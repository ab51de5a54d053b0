"""Attention by loops: `attention_call` is the entry, `attention_choice` has the candidates.

`attention_executable` builds what runs the one chosen, and merges the results of several ranks.
`local_attention` computes attention on a rank that has all keys of its queries, or by `key_windows` those that a block
mask allows. Otherwise `ring_attention` has the program of each rank, `ring_price` its price, `block_kernels` the local
kernels.

Design: docs/design/0019-attention-rings.md
"""
