"""Attention by the kernels of CUDA, under the contract of their conventions: each loop is what one device computes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from itertools import chain
from random import Random
from statistics import median
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.attention_cases import MESHES, as_near, drawn, layouts_drawn, leaf, loops_drawn, with_gradients
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dshard import Layout, Mesh, Replicate, Shard, StrategyError, manual_seed, randn, use_strategy
from dshard.ops import optimiser_steps
from dshard.ops.attention import block_kernels
from dshard.ops.attention.block_kernels import BlockResult, KeyPanel
from dshard.ops.attention.flex import RankScores
from dshard.ops.attention.local_attention import Options
from dshard.rules.attention_blocks import Block
from dshard.testing import cuda_contract, distribute, simulated, whole

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
flash, flash_backward = (getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention{n}") for n in ("", "_backward"))
efficient, efficient_backward = (
    getattr(torch.ops.aten, f"_scaled_dot_product_efficient_attention{n}") for n in ("", "_backward")
)


def run(given: list[Any], options: dict[str, Any], grad: Any) -> list[Any]:
    q, k, v, *mask = given
    return with_gradients(F.scaled_dot_product_attention(q, k, v, *mask, **options), given, grad)


def compared(seed: int) -> tuple[str, list[float]]:
    """A fault of one call in any layout and by any loop, or "", and errors over those of one device."""
    draw = Random(seed)
    dtype = draw.choice(DTYPES)
    given, options = drawn(draw, dtype, large=True)
    mesh, layouts = draw.choice(MESHES), []
    exact = [x.double() if x.is_floating_point() else x for x in given]
    size = (*given[0].shape[:-1], given[2].shape[-1])
    grad = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)
    right, alone = (
        [x.detach().double() for x in run(list(map(leaf, operands)), options, grad.to(kind))]
        for operands, kind in ((exact, torch.float64), (given, dtype))
    )
    largest = max((x.abs().max().item() for x in right if x.numel()), default=0.0)
    layouts = layouts_drawn(draw, given, mesh)
    for loops in [*(loops_drawn(draw, mesh) for _ in range(20)), None]:
        with suppress(StrategyError), simulated(mesh), use_strategy(attention=loops), cuda_contract():
            tensors = [leaf(distribute(x, layout)) for x, layout in zip(given, layouts, strict=True)]
            found = [whole(x.detach()) for x in run(tensors, options, grad)]
            triples = list(zip(found, right, alone, strict=True))
            wrong = [i for i, each in enumerate(triples) if not as_near(*each, largest)]
            far = [((x - r).norm().item(), (one - r).norm().item()) for x, r, one in triples if r.numel()]
            text = f"{wrong} of seed {seed}: {dtype} {mesh} {loops} {options} {[tuple(x.shape) for x in given]}"
            return (text if wrong else ""), [mine / one for mine, one in far if one]
    raise AssertionError("the choice is never refused")


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.thorough) for n in range(24, 5000, 24))])
def test_any_loops_are_as_near_as_one_device(first: int) -> None:
    faults, ratios = zip(*map(compared, range(first, min(first + 24, 5000))), strict=True)

    assert [text for text in faults if text] == []
    assert median(chain.from_iterable(ratios)) < 1.1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("loops", ["ring", "balanced ring", "split-keys", "context", "ulysses"])
def test_causal_loops_are_as_near_as_one_device(loops: str, dtype: torch.dtype) -> None:
    """Three heads, an odd number of keys on each rank: diagonals with rows below, slices of rows, odd offsets."""
    mesh, generator = Mesh((2,), ("x",)), torch.Generator().manual_seed(0)
    given = [torch.randn(1, 3, 50, size, generator=generator).to(dtype) for size in (12, 12, 16)]
    grad = torch.randn(1, 3, 50, 16, generator=generator).to(dtype)
    options, exact = {"is_causal": True}, [x.double() for x in given]
    right, alone = (
        [x.detach().double() for x in run(list(map(leaf, operands)), options, grad.to(operands[0].dtype))]
        for operands in (exact, given)
    )
    with simulated(mesh), use_strategy(attention=loops), cuda_contract():
        found = run([leaf(distribute(x, Layout(mesh, (Shard(2),)))) for x in given], options, grad)
        for mine, *others in zip(found, right, alone, strict=True):
            assert as_near(whole(mine.detach()), *others, max(x.abs().max().item() for x in right))


def test_a_gpu_before_ampere_gets_the_kernels_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a T4: `FlashAttention only supports Ampere GPUs or newer`, and no kernel takes bfloat16."""

    def chosen(dtype: torch.dtype) -> object:
        q = torch.zeros(1, 2, 4, 8, dtype=dtype)
        return block_kernels._kernel_of(block_kernels.Operands(q, q, q, None, 1.0, True, None, None))

    with cuda_contract():
        new = [chosen(dtype) for dtype in DTYPES]
        monkeypatch.setattr(block_kernels, "_capability", lambda device: (7, 5))
        old = [chosen(dtype) for dtype in DTYPES]

    flash, efficient, operators = (
        getattr(block_kernels, f"_{n}") for n in ("FLASH_ON_CUDA", "EFFICIENT_ON_CUDA", "OPERATORS")
    )
    assert new == [flash, flash, efficient]
    assert old == [operators, efficient, efficient]


def test_without_flash_half_precision_runs_by_the_efficient_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh, calls = Mesh((2,), ("x",)), list[str]()
    kernel = block_kernels._EFFICIENT_ON_CUDA
    counted = kernel._replace(backward=lambda *args: calls.append("backward") or kernel.backward(*args))  # type: ignore[func-returns-value]
    monkeypatch.setattr(block_kernels, "_EFFICIENT_ON_CUDA", counted)
    given = [torch.randn(2, 4, 48, 8, generator=torch.Generator().manual_seed(n)).bfloat16() for n in range(4)]
    options = {"is_causal": True}
    right = [x.detach().double() for x in run([leaf(x.double()) for x in given[:3]], options, given[3].double())]
    alone = [x.detach().double() for x in run([leaf(x) for x in given[:3]], options, given[3])]
    with simulated(mesh), use_strategy(attention="ring"), cuda_contract():
        laid = [leaf(distribute(x, Layout(mesh, (Shard(2),)))) for x in given[:3]]
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            found = run(laid, options, given[3])
        for mine, *others in zip(found, right, alone, strict=True):
            assert as_near(whole(mine.detach()), *others, max(x.abs().max().item() for x in right))
    assert calls


# -- the conventions themselves


def reals(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def test_kernels_disagree_on_a_causal_mask_of_more_queries_than_keys() -> None:
    q, k = reals(1, 1, 5, 8), reals(1, 1, 3, 8)
    scores = q.float() @ k.float().mT * 8**-0.5

    def attended(first: int) -> Tensor:
        seen = torch.ones(5, 3, dtype=torch.bool).tril(first)
        return (scores.masked_fill(seen.logical_not(), -torch.inf).softmax(-1).nan_to_num() @ k.float()).half()

    with cuda_contract():
        lower, lse, *_ = flash(q, k, k, is_causal=True)
        upper = efficient(q, k, k, None, True, is_causal=True)[0]

    torch.testing.assert_close(lower, attended(-2), atol=2e-3, rtol=0)
    torch.testing.assert_close(upper, attended(0), atol=2e-3, rtol=0)
    assert lse[0, 0].isinf().tolist() == [True, True, False, False, False]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_the_kernels_are_those_of_one_device(dtype: torch.dtype, causal: bool) -> None:
    *given, grad = (reals(2, 3, rows, 8, dtype=dtype) for rows in (33,) * 4)
    given = [x * scale for x, scale in zip(given, (1, 2, 3), strict=True)]
    right, alone = (
        [x.detach().double() for x in run(list(map(leaf, operands)), {"is_causal": causal}, grad.to(operands[0].dtype))]
        for operands in ([x.double() for x in given], given)
    )
    with cuda_contract():  # by torch's own formulas of their gradients
        by = [lambda *x: efficient(*x, None, True, 0.0, causal)[0]]
        by += [lambda *x: flash(*x, 0.0, causal)[0]] if dtype != torch.float32 else []
        for kernel in by:
            leaves = list(map(leaf, given))
            for mine, *others in zip(with_gradients(kernel(*leaves), leaves, grad), right, alone, strict=True):
                assert as_near(mine, *others, max(x.abs().max().item() for x in right))


def test_log_sum_exps_are_read_as_the_kernels_read_them() -> None:
    q, grad = reals(1, 2, 32, 8), reals(1, 2, 32, 8)
    none, numbers = q.new_empty(2, dtype=torch.uint64), q.new_zeros((), dtype=torch.int64)
    with cuda_contract():
        out, lse, *_ = flash(q, q, q)
        apart = torch.full((1, 2, 40), 7.0)[..., :32].copy_(lse)

        def by_flash(lse: Tensor) -> Tensor:
            return flash_backward(grad, q, q, q, out, lse, None, None, 32, 32, 0.0, False, none, none)[0]  # type: ignore[no-any-return]

        def by_efficient(lse: Tensor, out: Tensor = out) -> Tensor:
            wanted = [True, True, True, False]
            return efficient_backward(grad, q, q, q, None, out, lse, numbers, numbers, 0.0, wanted)[0]  # type: ignore[no-any-return]

        right = by_flash(lse)
        assert not torch.allclose(by_flash(apart), right)  # as contiguous memory, whatever its strides
        torch.testing.assert_close(by_efficient(apart), right)  # with its strides
        assert not torch.allclose(by_efficient(lse, out.contiguous()), right)  # rows of all heads are expected
        short = q[:, :, :20]
        short_out, short_lse, *_ = efficient(short, q, q, None, True)
        assert short_lse.shape[-1] == 32
        assert short_lse[..., 20:].isinf().all()
        short_lse = F.pad(short_lse[..., :20], (0, 12), value=torch.nan)[..., :20]
        args = (None, short_out, short_lse, numbers, numbers, 0.0, [True] * 3 + [False])
        assert efficient_backward(grad[:, :, :20], short, q, q, *args)[1].isnan().any()  # read beyond the rows


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: flash(*(reals(1, 1, 4, 8, dtype=torch.float32) for _ in range(3))), "dtype: flash takes float16"),
        (lambda: flash(*(reals(1, 1, 4, 24)[..., :20] for _ in range(3))), "size: .* a multiple of 8"),
        (lambda: flash(*(reals(1, 1, 4, 264) for _ in range(3))), "size: .* at most 256"),
        (lambda: flash(reals(1, 1, 4, 8), reals(1, 1, 4, 8), reals(1, 1, 4, 16)), "size: flash takes one size"),
        (lambda: flash(*(reals(1, 1, 8, 8).mT for _ in range(3))), "last dim"),
        (lambda: flash(*(reals(1, 1, 4, 9)[..., :8] for _ in range(3))), r"alignment: .* strides \(36, 36, 9, 1\)"),
        (lambda: flash(*(reals(65)[1:].view(1, 1, 8, 8) for _ in range(3))), "alignment: .* an offset of 1"),
        (lambda: flash(*(reals(1, h, 4, 8) for h in (3, 2, 2))), "heads"),
        (lambda: flash(*(reals(0, 1, 4, 8) for _ in range(3))), "none is empty"),
        (lambda: flash(*(reals(1, 1, 4, 8) for _ in range(3)), 0.5), "no dropout"),
        (lambda: efficient(*(reals(1, h, 4, 8) for h in (2, 1, 1)), None, True), "heads: efficient"),
        (lambda: efficient(*(reals(1, 1, 4, 8, dtype=torch.float64) for _ in range(3)), None, True), "dtype"),
        (lambda: efficient(*(reals(1, 1, 4, 8) for _ in range(3)), reals(1, 1, 4, 4), True), "alignment"),
    ],
)
def test_what_the_kernels_refuse_is_refused(call: Callable[[], object], text: str) -> None:
    with pytest.raises(RuntimeError, match=text), cuda_contract():
        call()


def test_outside_of_the_contract_the_kernels_are_missing_and_branches_are_those_of_the_cpu() -> None:
    with cuda_contract():
        pass
    with pytest.raises(NotImplementedError, match=r"within dshard.testing.cuda_contract\(\) alone"):
        flash(*(reals(1, 1, 4, 8) for _ in range(3)))
    q = torch.randn(1, 1, 5, 8)
    panel = KeyPanel(q, q, q, None, [Block(range(5), range(3), diagonal=True)], 1.0)
    with torch.no_grad():
        result, by_cuda = BlockResult(q, q), BlockResult(q, q)
        result.add(panel)
        with cuda_contract():
            by_cuda.add(panel)

    assert result.reached == [range(5)]  # one kernel, whose mask counts from the upper left
    assert by_cuda.reached == [range(3), range(3, 5)]
    for mine, other in zip(result.complete(), by_cuda.complete(), strict=True):
        torch.testing.assert_close(mine, other)


# -- the other places that ask for the type of device


def test_random_numbers_and_lookups_are_those_of_the_cpu_and_bounds_are_checked_where_the_kernel_runs() -> None:
    mesh, indices = Mesh((2,), ("x",)), torch.tensor([[6, 0], [3, 5]])
    table = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
    with simulated(mesh):
        laid = distribute(table, Layout(mesh, (Shard(0),)))
        rows, beyond = (distribute(x, Layout(mesh, (Replicate(),))) for x in (indices, indices + 1))
        drawn_on = []
        for contract in (nullcontext(), cuda_contract()):
            with contract:
                manual_seed(0)
                numbers = randn(5, 70, device_mesh=mesh, placements=[Shard(0)])
                drawn_on.append(whole(numbers))
                assert whole(F.embedding(rows, laid)).equal(table[indices])
                # torch's errors, of devices that are waited for and of others
                error = IndexError if len(drawn_on) == 1 else RuntimeError
                with pytest.raises(error, match=r"out of (bounds|range)"):
                    F.embedding(beyond, laid)
    assert drawn_on[0].equal(drawn_on[1])


def test_optimisers_on_a_gpu_step_as_torch_does_by_default() -> None:
    mesh = Mesh((2,), ("x",))
    with simulated(mesh):
        group = {"params": [distribute(torch.ones(4), Layout(mesh, (Shard(0),)))]}
        assert optimiser_steps._leaves_open(group)
        with cuda_contract():
            assert not optimiser_steps._leaves_open(group)


def test_flex_attention_of_a_range_runs_by_torchs_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[str]()
    monkeypatch.setattr(RankScores, "by_torch", lambda self, *args: calls.append("by torch") or self.held(*args))
    q, k = reals(1, 2, 5, 8, dtype=torch.float32), reals(1, 2, 7, 8, dtype=torch.float32)
    ranges = [range(1), range(2), range(5)]
    scores = RankScores(lambda x, b, h, i, j: x + i - j, None, Options(False, None, False), ranges, range(7))
    expected = scores.attend(q, k, k)
    assert not calls
    with cuda_contract():
        assert scores.attend(q, k, k).equal(expected)
    assert calls == ["by torch"]
