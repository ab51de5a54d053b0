"""Attention by loops: `attention_call` is the entry, `attention_choice` has the candidates.

`local_attention` is what a rank computes that has all keys of its queries; `key_windows` brings it those that a block
mask lets them see. Otherwise `ring_attention` has the program of each rank, `ring_price` what it takes, `block_kernels`
what is computed, and `partial_attention` merges the results.
"""
