"""The product that a rank computes of its parts: the one of torch's kernels that fits the terms."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from string import ascii_letters
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from dshard.ops.rule import Term

LocalProduct: TypeAlias = Callable[[Tensor, Tensor], Tensor]


@lru_cache(maxsize=4096)
def local_product(a: Term, b: Term, out: Term) -> LocalProduct:
    """The function that multiplies tensors of terms `a` and `b` into one of term `out`; each dim is one factor or none.

    >>> row, column, both = (("m",), ("k",)), (("k",), ("n",)), (("m",), ("n",))
    >>> local_product(row, column, both)(torch.ones(2, 3), torch.ones(3, 4)).tolist()
    [[3.0, 3.0, 3.0, 3.0], [3.0, 3.0, 3.0, 3.0]]
    """
    if () not in (*a, *b, *out):
        found = _linear(a, b, out) or _matmul(a, b, out) or _weight_gradient(a, b, out)
        if found is not None:
            return found
        turned = _matmul(b, a, out)
        if turned is not None:
            return lambda x, y: turned(y, x)
    return _einsum(a, b, out)


def _linear(a: Term, b: Term, out: Term) -> LocalProduct | None:
    """`... k, n k -> ... n`, the weight stored [out, in]."""
    if len(a) > 0 and len(b) == 2 and b[1] == a[-1] and out == (*a[:-1], b[0]) and b[0] not in a:
        return F.linear
    return None


def _matmul(a: Term, b: Term, out: Term) -> LocalProduct | None:
    """Matrices, or batches of the same batch dims, either of them transposed; a matrix to the right of any."""
    if len(a) > 1 and len(b) == 2 and b[0] == a[-1] and out == (*a[:-1], b[1]) and b[1] not in a:
        return torch.matmul
    lead = len(out) - 2
    if lead < 0 or not len(a) == len(b) == len(out) or not a[:lead] == b[:lead] == out[:lead]:
        return None
    m, n = out[lead:]
    turned_a = a[lead + 1] == m
    turned_b = b[lead] == n
    k = a[lead if turned_a else lead + 1]
    if a[lead:] != ((k, m) if turned_a else (m, k)) or b[lead:] != ((n, k) if turned_b else (k, n)) or k in out:
        return None
    return _TURNED[turned_a, turned_b]


_TURNED: dict[tuple[bool, bool], LocalProduct] = {
    (False, False): torch.matmul,
    (True, False): lambda a, b: torch.matmul(a.mT, b),
    (False, True): lambda a, b: torch.matmul(a, b.mT),
    (True, True): lambda a, b: torch.matmul(a.mT, b.mT),
}


def _weight_gradient(a: Term, b: Term, out: Term) -> LocalProduct | None:
    """`... n, ... k -> n k`, or the same turned: all leading dims are contracted."""
    if len(a) != len(b) or len(a) < 3 or a[:-1] != b[:-1] or len(out) != 2:
        return None
    if out == (a[-1], b[-1]):
        return lambda a, b: torch.mm(a.flatten(0, -2).t(), b.flatten(0, -2))
    if out == (b[-1], a[-1]):
        return lambda a, b: torch.mm(b.flatten(0, -2).t(), a.flatten(0, -2))
    return None


def _einsum(a: Term, b: Term, out: Term) -> LocalProduct:
    letters: dict[str, str] = {}
    for term in (a, b, out):
        for dim in term:
            if dim:
                letters.setdefault(dim[0], ascii_letters[len(letters)])
    sides = ["".join(letters[dim[0]] for dim in term if dim) for term in (a, b, out)]
    equation = f"{sides[0]},{sides[1]}->{sides[2]}"
    ones_a, ones_b, ones_out = (tuple(i for i, dim in enumerate(term) if not dim) for term in (a, b, out))

    def product(x: Tensor, y: Tensor) -> Tensor:
        found = torch.einsum(equation, x.squeeze(ones_a), y.squeeze(ones_b))
        for i in ones_out:
            found = found.unsqueeze(i)
        return found

    return product
