"""The tables of what products and blocks move, held to the best that was known for each row."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from matmul_tables import BLOCKS, PRODUCTS, RECTANGLES, Block, Product


@pytest.mark.parametrize("product", [*PRODUCTS, *RECTANGLES], ids=lambda p: f"{p.name} {p.mesh}")
def test_a_product_moves_no_more_than_the_best_known(product: Product) -> None:
    moved, work = product.measured()

    assert moved <= product.torch_mib + 1e-3
    assert work == (8 if product.name == "both whole" else 1), "work done more than once"
    if not product.unattainable:
        assert moved <= 1.02 * product.best_mib + 1e-3


@pytest.mark.parametrize("block", BLOCKS, ids=lambda b: f"{b.name} {b.mesh}")
def test_a_block_moves_no_more_than_the_best_known(block: Block) -> None:
    inference, forward, backward, elsewhere = block.measured()

    assert block.best_mib[0] is not None
    assert inference <= 1.02 * block.best_mib[0]
    if block.best_mib[1] is not None:
        assert forward + backward <= 1.02 * sum(block.best_mib)
    if block.torch_mib[1] is not None:
        assert forward + backward <= sum(block.torch_mib)
    assert not elsewhere, "gradients lie like their tensors"
