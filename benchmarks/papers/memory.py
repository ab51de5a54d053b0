"""What two published claims on how much fits on 64 GPUs come to, by the layouts of their papers.

Optimus keeps operands as they are stored and gathers them again, which a program of dshard does not
(`plan_model` prices that); so the bytes are counted here, as the papers do.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt

from benchmarks.papers.traced import Sizes

RTX_5000, A100 = 16e9, 40e9
FORMS = ("megatron", "optimus")
HEADS, GPUS, LAYERS, ITEMSIZE = 64, 64, 24, 4


def held(form: str, sizes: Sizes, batch: int, *, recompute: bool) -> int:
    """Bytes of a rank that trains in fp32 with Adam, on 64 GPUs: four for each weight, activations, one product's own.

    A block keeps the inputs of both norms, of its four linear layers and of the activation function, queries, keys and
    values, the scores, and what softmax made of them. Megatron has the residual stream on each rank and adds up partial
    results as large; Optimus has blocks of all, and gathers rows of activations and columns of weights for a product.
    """
    tokens, hidden = batch * sizes.tokens, sizes.hidden
    stream = tokens * hidden // (GPUS if form == "optimus" else 1)
    scores = 2 * batch * sizes.heads * sizes.tokens**2 // GPUS
    kept = 4 * stream + 12 * tokens * hidden // GPUS + scores
    activations = LAYERS * stream + kept if recompute else LAYERS * kept
    product = stream if form == "megatron" else 4 * hidden * (tokens + hidden) // isqrt(GPUS)
    return ITEMSIZE * (4 * LAYERS * 12 * hidden**2 // GPUS + activations + product)


def most(fits: Callable[[int], bool], step: int) -> int:
    """The largest multiple of `step` that fits; 0 if none does. What fits must be below what does not.

    >>> most(lambda n: n <= 50, 8)
    48
    """
    low, high = 0, 1
    while fits(high * step):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * step) else (low, middle)
    return low * step


def optimus_batches() -> dict[str, int]:
    """The largest batches of figure 9 on 64 GPUs: table 2's last model, blocks run again for the backward pass."""
    sizes = Sizes(8192, 128, 512, 64)
    return {
        "megatron": most(lambda b: held("megatron", sizes, b, recompute=True) <= RTX_5000, 1),
        "optimus": most(lambda b: held("optimus", sizes, b, recompute=True) <= RTX_5000, 8),
    }


def vit(hidden: int) -> Sizes:
    """ViT-Large/16 on images of 224 x 224, of another width; 64 heads, as the 16 of the original stop at 16 ranks."""
    return Sizes(hidden, HEADS, 197, hidden // HEADS)


def blog_batches() -> dict[str, int]:
    """The largest batches of ViT-Large on 64 GPUs of 40 GB, nothing run again."""
    return {form: most(lambda b, f=form: held(f, vit(1024), b, recompute=False) <= A100, 8) for form in FORMS}


def blog_parameters(batch: int = 64) -> dict[str, int]:
    """The most parameters at this batch: the width grows."""
    widths = {
        form: most(lambda h, f=form: held(f, vit(h), batch, recompute=False) <= A100, HEADS * 2) for form in FORMS
    }
    return {form: LAYERS * 12 * width**2 for form, width in widths.items()}
