"""Cross entropy of a linear layer, by chunks of rows, whose logits are never there as a whole.

`chunked_loss` is what a rank computes of one chunk, and the program of a rank, with its collectives, `fused_choice` the
candidates and their local work, `fused_call` the entry, and what runs them.

Design: docs/design/0028-fused-losses.md
"""
