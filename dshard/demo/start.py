"""Train on ranks of our own, or on those that a launcher such as torchrun has started."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from dshard import launch
from dshard.demo.data import check_installed
from dshard.demo.train import Row, Settings, Tell, train_all

Work: TypeAlias = Callable[[Settings, Tell], list[Row]]


def run(settings: Settings, tell: Tell, work: Work = train_all) -> list[Row]:
    """Train under each strategy; the rows, on the process that reports. `tell` hears of each step there.

    Raises:
        RankError: a rank failed; the message names it.
        MissingExtra: scikit-learn is not installed.
    """
    check_installed()
    return launch.run(partial(work, settings), tell, ranks=settings.ranks, device=settings.device)
