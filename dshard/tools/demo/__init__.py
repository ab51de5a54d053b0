"""A small vision transformer learns handwritten digits under several layouts, whose losses are compared.

    rows = run(Settings(ranks=4), report=print)

The model (`vit.py`) is an ordinary `nn.Module`, laid out by `dshard.parallelize` (`train.py`).
"""

from dshard.tools.demo.train import BATCH, Predicted, Progress, Row, Settings, draw, find, names, predict, rank, run
