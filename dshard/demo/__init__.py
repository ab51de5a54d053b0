"""A small vision transformer learns handwritten digits under several layouts, and every loss is compared.

    rows = run(Settings(ranks=4), tell=print)

The model (`vit.py`) is an ordinary `nn.Module`; the layouts (`layouts.py`) are a table of placements.
"""

from dshard.demo.curves import draw
from dshard.demo.layouts import find, names
from dshard.demo.predict import Predicted, predict, rank
from dshard.demo.start import run
from dshard.demo.train import BATCH, Progress, Row, Settings

__all__ = [
    "BATCH",
    "Predicted",
    "Progress",
    "Row",
    "Settings",
    "draw",
    "find",
    "names",
    "predict",
    "rank",
    "run",
]
