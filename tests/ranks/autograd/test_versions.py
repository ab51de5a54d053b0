"""What was saved for a backward pass and overwritten since is refused wherever one device refuses it, nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import settings
from torch import Tensor

import dshard
from dshard import DTensor, Mesh
from dshard.comm import bind, plain
from dshard.testing import RankPool, distribute, simulated, whole
from dshard.testing.rule_rows import layouts_of

THOROUGH = settings().max_examples > 100
SHAPE = (6, 5)
REFUSED = "modified by an inplace operation"
USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sigmoid": lambda h, w: h.sigmoid(),
    "exp": lambda h, w: torch.exp(h),
    "relu": lambda h, w: F.relu(h),
    "sin": lambda h, w: h.sin(),
    "square": lambda h, w: h * h,
    "pow": lambda h, w: h.pow(2),
    "gelu": lambda h, w: F.gelu(h),
    "softplus": lambda h, w: F.softplus(h),
    "normalised": lambda h, w: F.normalize(h, dim=0),
    "times a constant": lambda h, w: h * 3,
    "plus": lambda h, w: h + w,
    "times": lambda h, w: h * w,
    "copied": lambda h, w: h.clone(),
    "softmax": lambda h, w: h.softmax(-1),
    "layer norm": lambda h, w: F.layer_norm(h, SHAPE[1:]),
    "product": lambda h, w: h @ w.t(),
    "linear": lambda h, w: F.linear(w, h),
    "sum": lambda h, w: h.sum(0),
    "most": lambda h, w: h.amax(1),
    "running": lambda h, w: h.cumsum(0),
    "viewed": lambda h, w: h.view(-1).sigmoid(),
    "of a view": lambda h, w: h.unsqueeze(0).exp(),
}
"""Of a tensor and a leaf of its shape; some save the tensor, some what comes out, some nothing."""
ATTENTION: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "queries": lambda h, w: attended(h, w, w),
    "keys": lambda h, w: attended(w, h, w),
    "values": lambda h, w: attended(w, w, h),
}
"""Where operands are redistributed before what they are saved for is known."""
WRITES: dict[str, Callable[[Tensor], object]] = {
    "none": lambda t: None,
    "read": lambda t: t * 2,
    "scaled": lambda t: t.mul_(3),
    "added to": lambda t: t.add_(torch.ones_like(t)),
    "added to by name": lambda t: t.__iadd__(1.0),
    "zeroed": lambda t: t.zero_(),
    "copied over": lambda t: t.copy_(torch.ones_like(t)),
    "an element set": lambda t: t.__setitem__(0, 1.0),
    "by a view": lambda t: t.view(-1).mul_(2),
    "by a view of a view": lambda t: t.view(-1).unsqueeze(0).add_(1),
    "detached": lambda t: t.detach().mul_(2),
    "a view detached": lambda t: t.view(-1).detach().mul_(2),
    "in the dark": lambda t: dark(lambda: t.mul_(2)),
    "a view in the dark": lambda t: dark(lambda: t.view(-1).mul_(2)),
    "a list": lambda t: dark(lambda: torch._foreach_mul_([t], 2.0)),
    "its data": lambda t: t.data.mul_(1),
    "a view of its data": lambda t: t.data.view(-1).mul_(1),
    "out": lambda t: dark(lambda: torch.mul(t.detach(), 2, out=t)),
    "drawn": lambda t: dark(lambda: t.fill_(0.5)),
    "in other dims": lambda t: t.unsqueeze_(0),
    "a copy": lambda t: t.clone().mul_(2),
}
OPTIMISERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, 0.1, foreach=False),
    "sgd of lists": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, foreach=True),
    "adam of lists": lambda params: torch.optim.Adam(params, 0.1, foreach=True),
    "adam fused": lambda params: torch.optim.AdamW(params, 0.1, fused=True),
}


def dark(write: Callable[[], object]) -> None:
    with torch.no_grad():
        write()


def attended(*operands: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*(x.unsqueeze(0).unsqueeze(0) for x in operands))


def written(use: str, write: str, to: str, x: Tensor, w: Tensor) -> list[Tensor] | str:
    """The gradients of a program that writes between its forward and its backward pass, or what refuses it."""
    h = x * 1.5
    y = (USES | ATTENTION)[use](h, w)
    target = {"operand": h, "result": y, "leaf": w}[to]
    try:
        WRITES[write](target) if to != "leaf" else dark(lambda: WRITES[write](target))
    except RuntimeError as error:
        return f"write: {type(error).__name__}"
    try:
        (y * y.detach().cos()).sum().backward()
    except RuntimeError as error:
        return REFUSED if REFUSED in str(error) else str(error)
    with plain():
        versions = torch.tensor([t._version for t in (h, y, w)])
    return [versions, *(t.grad for t in (x, w) if t.grad is not None)]


def stepped(use: str, optimiser: str, x: Tensor, w: Tensor) -> list[Tensor] | str:
    """An optimiser's step between forward and backward, and another where it belongs."""
    steps = OPTIMISERS[optimiser]([x, w])
    (USES[use](x, w).sum() + (w * x).sum()).backward()
    steps.step()
    steps.zero_grad()
    y = USES[use](x, w)
    y.sum().backward()
    steps.step()
    y = USES[use](x * 2, w)
    x.grad, w.grad = torch.ones_like(x), torch.ones_like(w)
    steps.step()
    try:
        y.sum().backward()
    except RuntimeError as error:
        return REFUSED if REFUSED in str(error) else str(error)
    return [x.detach(), w.detach()]


Program = Callable[[Tensor, Tensor], list[Tensor] | str]


def programs(share: float, seed: int, uses: Iterable[str] = USES) -> list[tuple[str, Program]]:
    draw = Random(seed)
    found: list[tuple[str, Program]] = [
        (f"{use}, {to} {write}", lambda x, w, use=use, write=write, to=to: written(use, write, to, x, w))
        for use in uses
        for write in WRITES
        for to in ("operand", "result", "leaf")
        if draw.random() < share and (write, to) != ("in other dims", "leaf")  # its views are no more what they were
    ]
    return found + [
        (f"{use}, {name}", lambda x, w, use=use, name=name: stepped(use, name, x, w))
        for use in uses
        for name in OPTIMISERS
        if use in USES and draw.random() < share
    ]


def leaves() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    with plain():
        return [torch.randn(SHAPE, dtype=torch.float64, generator=generator) for _ in range(2)]


Expected = list[tuple[str, Program, list[Tensor] | str]]
"""Programs, and what one device meets."""


def on_one_device(share: float, seed: int, uses: Iterable[str] = USES) -> Expected:
    drawn = programs(share, seed, uses)
    return [(name, program, program(*[x.requires_grad_() for x in leaves()])) for name, program in drawn]


def differences(mesh: Mesh, expected: Expected, seed: int) -> list[str]:
    """Where what ranks meet is not what one device meets, with operands laid out at random."""
    draw, wrong = Random(seed), []
    layouts = layouts_of(leaves()[0], mesh)
    unreduced = [layout for layout in layouts if not layout.partial_axes()]
    for name, program, right in expected:
        steps = name.split(", ")[1] in OPTIMISERS  # they refuse partial parameters
        laid = [draw.choice(unreduced if steps else layouts) for _ in range(2)]
        for warm in (False, True):
            found = program(*[distribute(x, at).requires_grad_() for x, at in zip(leaves(), laid, strict=True)])
            if not alike(found, right):
                told = found if isinstance(found, str) else "not refused" if isinstance(right, str) else "another value"
                where = f"{name} of [{laid[0]}] and [{laid[1]}], {'warm' if warm else 'cold'}"
                wrong.append(f"{where}: {told}, not {right}")
    return wrong


def alike(found: list[Tensor] | str, right: list[Tensor] | str) -> bool:
    if isinstance(found, str) or isinstance(right, str):
        return isinstance(found, str) and isinstance(right, str) and found.startswith(right[:60])
    return len(found) == len(right) and all(map(same, found, right))


def same(found: Tensor, right: Tensor) -> bool:
    with plain():
        return torch.allclose(whole(found) if isinstance(found, DTensor) else found, right, equal_nan=True)


def on_ranks(shape: tuple[int, ...], share: float, seed: int, uses: Iterable[str] = tuple(USES)) -> list[str]:
    return differences(bind(dshard.init_device_mesh("cpu", shape)), on_one_device(share, seed, uses), seed)


@pytest.mark.ranks
def test_what_was_overwritten_is_refused_where_one_device_refuses_it(ranks: RankPool) -> None:
    assert ranks.run(on_ranks, (4,), 0.01, 0) == [[]] * 4


@pytest.mark.ranks
def test_a_redistributed_operand_of_attention_is_refused_as_the_operand(ranks: RankPool) -> None:
    assert ranks.run(on_ranks, (2, 2), 0.05, 0, tuple(ATTENTION)) == [[]] * 4


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
@pytest.mark.parametrize("seed", range(3))
def test_all_writes_between_forward_and_backward(ranks: RankPool, shape: tuple[int, ...], seed: int) -> None:
    assert ranks.run(on_ranks, shape, 1.0, seed, timeout=1200) == [[]] * 4


@pytest.mark.parametrize("shape", [(3,), (2, 2)])
def test_simulated_ranks_refuse_the_same(shape: tuple[int, ...]) -> None:
    mesh, expected = Mesh(shape), on_one_device(0.6 if THOROUGH else 0.02, 1)
    with simulated(mesh):
        assert differences(mesh, expected, 1) == []
