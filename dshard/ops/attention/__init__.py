"""Attention by loops: `attention_call` is the entry, `attention_choice` has the candidates.

`local_attention` is what a rank computes, and `split_keys` merges the results of loop k.
"""
