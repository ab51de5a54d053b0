"""What the memory model says of two published claims on how much fits on 64 GPUs."""

from __future__ import annotations

from collections.abc import Callable

from dshard.simulate import Model, Setup, form_of
from dshard.simulate.block import BlockCosts
from dshard.simulate.memory import memory_of
from dshard.topology import BYTES

RTX_5000, A100 = 16e9, 40e9
FORMS = {"megatron": (64,), "optimus": (8, 8)}
HEADS = 64


def held(form: str, model: Model, batch: int, *, recompute: bool) -> int:
    """Bytes of a rank that trains in fp32 with Adam, on 64 GPUs."""
    setup = Setup(form_of(form), FORMS[form], recompute=recompute)
    return memory_of(BlockCosts(model, setup, BYTES, "float32", 4, exact=False, regather=True), batch).total


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
    model = Model(24, 8192, 128, 512, fused=False)
    return {
        "megatron": most(lambda b: held("megatron", model, b, recompute=True) <= RTX_5000, 1),
        "optimus": most(lambda b: held("optimus", model, b, recompute=True) <= RTX_5000, 8),
    }


def vit(hidden: int) -> Model:
    """ViT-Large/16 on images of 224 x 224, of another width; 64 heads, as the 16 of the original stop at 16 ranks."""
    return Model(24, hidden, HEADS, 197, fused=False)


def blog_batches() -> dict[str, int]:
    """The largest batches of ViT-Large on 64 GPUs of 40 GB, nothing run again."""
    return {form: most(lambda b, f=form: held(f, vit(1024), b, recompute=False) <= A100, 8) for form in FORMS}


def blog_parameters(batch: int = 64) -> dict[str, int]:
    """The most parameters at this batch: the width grows."""
    widths = {
        form: most(lambda h, f=form: held(f, vit(h), batch, recompute=False) <= A100, HEADS * 2) for form in FORMS
    }
    return {form: vit(width).parameters for form, width in widths.items()}
