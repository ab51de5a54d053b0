"""A small vision transformer learns handwritten digits under several layouts, and every loss is compared.

    rows = run(Settings(ranks=4), tell=print)

The model (`model.py`) is an ordinary `nn.Module`; the layouts (`strategies.py`) are a table of placements.
"""

from dshard.demo.launch import run
from dshard.demo.strategies import find, names
from dshard.demo.train import Progress, Row, Settings

__all__ = ["Progress", "Row", "Settings", "find", "names", "run"]
