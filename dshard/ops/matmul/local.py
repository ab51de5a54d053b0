"""The local matmul of a rank: the fastest torch kernel for the dims of operands and result."""

from __future__ import annotations

from collections.abc import Callable
from string import ascii_letters
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from dshard.caches import cached
from dshard.rules.rule import Term

LocalProduct: TypeAlias = Callable[[Tensor, Tensor], Tensor]


@cached("local products", 4096)
def local_product(a: Term, b: Term, out: Term) -> LocalProduct:
    """A function that multiplies tensors of terms `a` and `b` to one of term `out`; each dim has at most one factor.

    >>> row, column, both = (("m",), ("k",)), (("k",), ("n",)), (("m",), ("n",))
    >>> local_product(row, column, both)(torch.ones(2, 3), torch.ones(3, 4)).tolist()
    [[3.0, 3.0, 3.0, 3.0], [3.0, 3.0, 3.0, 3.0]]
    """
    if () not in (*a, *b, *out):
        kernel = _linear(a, b, out) or _matmul(a, b, out) or _weight_gradient(a, b, out)
        if kernel is not None:
            return kernel
        swapped_kernel = _matmul(b, a, out)
        if swapped_kernel is not None:
            return lambda x, y: swapped_kernel(y, x)
    return _einsum(a, b, out)


def _linear(a: Term, b: Term, out: Term) -> LocalProduct | None:
    """`... k, n k -> ... n`, the weight stored [out, in]."""
    if len(a) > 0 and len(b) == 2 and b[1] == a[-1] and out == (*a[:-1], b[0]) and b[0] not in a:
        return F.linear
    return None


def _matmul(a: Term, b: Term, out: Term) -> LocalProduct | None:
    """The matmul of matrices or equal batches, either transposed; or of any tensor with a matrix to its right."""
    if len(a) > 1 and len(b) == 2 and b[0] == a[-1] and out == (*a[:-1], b[1]) and b[1] not in a:
        return torch.matmul
    lead = len(out) - 2
    if lead < 0 or not len(a) == len(b) == len(out) or not a[:lead] == b[:lead] == out[:lead]:
        return None
    m, n = out[lead:]
    transposed_a = a[lead + 1] == m
    transposed_b = b[lead] == n
    k = a[lead if transposed_a else lead + 1]
    if a[lead:] != ((k, m) if transposed_a else (m, k)) or b[lead:] != ((n, k) if transposed_b else (k, n)) or k in out:
        return None
    return _MATMULS[transposed_a, transposed_b]


_MATMULS: dict[tuple[bool, bool], LocalProduct] = {
    (False, False): torch.matmul,
    (True, False): lambda a, b: torch.matmul(a.mT, b),
    (False, True): lambda a, b: torch.matmul(a, b.mT),
    (True, True): lambda a, b: torch.matmul(a.mT, b.mT),
}


def _weight_gradient(a: Term, b: Term, out: Term) -> LocalProduct | None:
    """`... n, ... k -> n k`, or its transpose: all leading dims are contracted."""
    if len(a) != len(b) or len(a) < 3 or a[:-1] != b[:-1] or len(out) != 2:
        return None
    if out == (a[-1], b[-1]):
        return lambda a, b: torch.mm(a.flatten(0, -2).t(), b.flatten(0, -2))
    if out == (b[-1], a[-1]):
        return lambda a, b: torch.mm(b.flatten(0, -2).t(), a.flatten(0, -2))
    return None


def accumulating(a: Term, b: Term, out: Term) -> Callable[[Tensor, Tensor, Tensor], object]:
    """A function that adds the matmul of tensors of terms `a` and `b` to a tensor of term `out`, in place.

    >>> row, column, both = (("m",), ("k",)), (("k",), ("n",)), (("m",), ("n",))
    >>> total = torch.ones(2, 4)
    >>> accumulating(row, column, both)(total, torch.ones(2, 3), torch.ones(3, 4))[0].tolist()
    [4.0, 4.0, 4.0, 4.0]
    """
    if len(a) == len(b) == len(out) == 2 and () not in (*a, *b, *out):
        m, n = out if out[0] in a else out[::-1]
        shared = set(a) & set(b) - set(out)
        if len(shared) == 1 and {m, *shared} == set(a) and {n, *shared} == set(b):
            transposes_out, transposes_a, transposes_b = out[0] != m, a[0] != m, b[1] != n

            def add(total: Tensor, x: Tensor, y: Tensor) -> Tensor:
                return (total.t() if transposes_out else total).addmm_(
                    x.t() if transposes_a else x, y.t() if transposes_b else y
                )

            return add
    product = local_product(a, b, out)
    return lambda total, x, y: total.add_(product(x, y))


def outlined(a: Term, b: Term, out: Term) -> LocalProduct:
    """A function that returns an empty tensor of the result's shape, for operands without data.

    >>> row, column, both = (("m",), ("k",)), (("k",), ("n",)), (("m",), ("n",))
    >>> outlined(row, column, both)(torch.empty(2, 3, device="meta"), torch.empty(3, 4, device="meta")).shape
    torch.Size([2, 4])
    """

    def outline(x: Tensor, y: Tensor) -> Tensor:
        sizes = dict(zip((*a, *b), (*x.shape, *y.shape), strict=True))
        return x.new_empty([sizes[dim] if dim else 1 for dim in out])

    return outline


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
        result = torch.einsum(equation, x.squeeze(ones_a), y.squeeze(ones_b))
        for i in ones_out:
            result = result.unsqueeze(i)
        return result

    return product
