"""Plans of whole steps: the layouts of all tensors of a traced step chosen together.

eliminate.py  the least sum of tables over shared variables
"""
