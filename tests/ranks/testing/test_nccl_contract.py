"""The process group that behaves as NCCL: what it refuses, and when things are done.

Each case names its rule; `RULES` has the source of each.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dshard.comm import put
from dshard.core.transforms import unwrapped
from dshard.testing import RankPool, nccl_contract, rank_pool
from dshard.testing.nccl_contract import RULES
from dshard.tools.nccl_contract.process_state import _FAILED, CURRENT, ProcessState
from dshard.torch_private import late

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def ranks() -> RankPool:
    """Ranks over gloo, each of whose programs makes a group under the contract."""
    return rank_pool(4, "gloo")


Group = dist.ProcessGroup
Program = Callable[[Group, int], object]


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def complex_zeros(size: int) -> Tensor:
    return zeros(size, dtype=torch.complex64)


def reduced(x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Program:
    return lambda group, rank: dist.all_reduce(x, op, group=group)


def in_a_group(group: Group, rank: int) -> None:
    group._start_coalescing(torch.device("cpu"))
    try:
        dist.all_reduce(zeros(2), group=group, async_op=True).wait()  # type: ignore[union-attr]
    finally:
        group._end_coalescing(torch.device("cpu"))


def group_in_a_group(group: Group, rank: int) -> None:
    group._start_coalescing(torch.device("cpu"))
    try:
        group._start_coalescing(torch.device("cpu"))
    finally:
        group._end_coalescing(torch.device("cpu"))


def overlapping(group: Group, rank: int) -> None:
    buffer = zeros(9)
    group.all_gather_single(buffer[1:], buffer[2 * rank : 2 * rank + 2])  # one element beside its place


def gathered_and_multiplied(x: Tensor, dim: int, y: Tensor) -> Program:
    return lambda group, rank: SYMMETRIC.fused_all_gather_matmul(x, [y], dim, group.group_name)


def multiplied_and_scattered(x: Tensor, y: Tensor, dim: int) -> Program:
    return lambda group, rank: SYMMETRIC.fused_matmul_reduce_scatter(x, y, "sum", dim, group.group_name)


def multiplied_over_gloo(group: Group, rank: int) -> None:
    gathered_and_multiplied(zeros(2, 3), 0, zeros(3, 2))(dist.new_group(backend="gloo"), rank)


SYMMETRIC, TORCHS = torch.ops.symm_mem, late("torch.distributed._symmetric_memory")
REFUSED: list[tuple[str, str, Program]] = [
    ("contiguous", "all_reduce of a tensor of shape", reduced(zeros(3, 4).t())),
    ("contiguous_message", "send to", lambda g, r: g.send([zeros(3, 4).t()], (r + 1) % 4, 0)),
    ("memory", "all_reduce of a Tensor on meta", reduced(torch.empty(2, device="meta"))),
    ("dense", "all_reduce", lambda g, r: g.allreduce([torch.eye(3).to_sparse()])),
    ("dtype", "torch.int16", reduced(zeros(2, dtype=torch.int16))),
    ("dtype", "torch.uint32", lambda g, r: g.broadcast(zeros(2, dtype=torch.uint32), 0)),
    ("dtype", "torch.complex64", lambda g, r: g.alltoall_base(complex_zeros(4), complex_zeros(4), [], [])),
    ("one_dtype", "torch.float32 and torch.float64", lambda g, r: g.all_gather_single(zeros(8), zeros(2).double())),
    ("reduction", "by BAND", reduced(zeros(2, dtype=torch.int32), dist.ReduceOp.BAND)),
    ("reduction", "by BXOR", reduced(zeros(2, dtype=torch.int32), dist.ReduceOp.BXOR)),
    ("bool_avg", "by AVG", reduced(zeros(2, dtype=torch.bool), dist.ReduceOp.AVG)),
    ("complex", "by MAX", lambda g, r: g.allreduce(zeros(2, dtype=torch.complex64), dist.ReduceOp.MAX)),
    ("float8", "float8_e4m3fn", reduced(zeros(2).to(torch.float8_e4m3fn))),
    ("gathered_size", "of 2 elements into 7", lambda g, r: g.all_gather_single(zeros(7), zeros(2))),
    ("scattered_size", "of 7 elements into 2", lambda g, r: g.reduce_scatter_single(zeros(2), zeros(7))),
    ("split_sizes", "of 6 rows in 4 pieces", lambda g, r: g.all_to_all_single(zeros(8), zeros(6), [], [])),
    ("split_sizes", "of 6 rows", lambda g, r: g.all_to_all_single(zeros(8), zeros(6), [2] * 4, [2, 2, 1, 0])),
    ("root", "root 4", lambda g, r: g.broadcast(zeros(2), 4)),
    ("peer", "recv from rank 4", lambda g, r: g.recv([zeros(2)], 4, 0)),
    ("peer", "send to rank", lambda g, r: g.send([zeros(2)], r, 0)),
    ("overlap", "all_gather_into_tensor", overlapping),
    ("coalescing", "by itself, within a group", in_a_group),
    ("coalescing", "a group within a group", group_in_a_group),
    ("coalescing", "has not begun", lambda g, r: g._end_coalescing(torch.device("cpu"))),
    ("unsupported", "recv from any rank", lambda g, r: g.recv_anysource([zeros(2)], 0)),
    ("unsupported", "monitored_barrier", lambda g, r: g.monitored_barrier()),
    ("unsupported", "fused_all_gather_matmul over gloo", multiplied_over_gloo),
    (
        "fused",
        "of shape (4, 2) and strides (1, 4) along dim 0",
        gathered_and_multiplied(zeros(2, 4).t(), 0, zeros(2, 2)),
    ),
    ("fused", "of a chunk of shape (2, 4)", gathered_and_multiplied(zeros(2, 4), 0, zeros(4, 4, 2))),
    ("fused", "of a chunk of shape (2, 4)", gathered_and_multiplied(zeros(2, 4), 0, zeros(4, 2).double())),
    ("fused", "of a chunk of shape (2, 3)", gathered_and_multiplied(zeros(2, 3), 0, zeros(3, 2))),
    ("fused", "of a chunk of shape (2, 4)", gathered_and_multiplied(zeros(10)[2:].view(2, 4), 0, zeros(4, 2))),
    ("fused", "(6, 3) and (3, 4), scattered along dim 0", multiplied_and_scattered(zeros(6, 3), zeros(3, 4), 0)),
    ("fused", "(4, 3) and (3, 6), scattered along dim 1", multiplied_and_scattered(zeros(4, 3), zeros(3, 6), 1)),
]


# -- programs that are wrong on several ranks together


def written_before_the_wait(group: Group, rank: int) -> None:
    x, out = torch.ones(2), zeros(8)
    work = group.all_gather_single(out, x)
    x.fill_(7.0)
    work.wait()


def two_communicators_in_two_orders(group: Group, rank: int) -> None:
    other = dist.new_group(backend=nccl_contract.BACKEND)
    assert other is not None
    for each in (group, other) if rank % 2 == 0 else (other, group):
        dist.all_reduce(zeros(2), group=each)


def two_communicators_in_two_orders_at_once(group: Group, rank: int) -> None:
    other = dist.new_group(backend=nccl_contract.BACKEND)
    assert other is not None
    for each in (group, other):  # their first operations would make the hosts wait
        dist.barrier(each)
    order = (group, other) if rank % 2 == 0 else (other, group)
    works = [dist.all_reduce(zeros(2), group=each, async_op=True) for each in order]
    for work in works:
        assert work is not None
        work.wait()


def gathered_unevenly(group: Group, rank: int) -> None:
    size = 2 + (rank == 3)
    group.all_gather_single(zeros(4 * size), zeros(size)).wait()


def reduced_by_different_operations(group: Group, rank: int) -> None:
    dist.all_reduce(zeros(2), dist.ReduceOp.SUM if rank else dist.ReduceOp.MAX, group=group)


def different_collectives(group: Group, rank: int) -> None:
    if rank == 2:
        dist.broadcast(zeros(2), 0, group=group)
    else:
        dist.all_reduce(zeros(2), group=group)


def exchanged_with_wrong_sizes(group: Group, rank: int) -> None:
    sizes = [1, 1, 1, 1]
    group.all_to_all_single(zeros(5 if rank == 1 else 4), zeros(4), [2, 1, 1, 1] if rank == 1 else sizes, sizes).wait()


def send_without_its_receive(group: Group, rank: int) -> None:
    if rank == 0:
        group.send([zeros(2)], 1, 0)
    dist.all_reduce(zeros(2), group=group)


def both_send_first(group: Group, rank: int) -> None:
    if rank > 1:
        return
    works = [group.send([zeros(2)], 1 - rank, 0), group.recv([zeros(2)], 1 - rank, 0)]
    for work in works:
        work.wait()


def message_of_another_size(group: Group, rank: int) -> None:
    if rank == 0:
        group.send([zeros(2)], 1, 0).wait()
    elif rank == 1:
        group.recv([zeros(3)], 0, 0).wait()


def memory_of_two_communicators(group: Group, rank: int) -> None:
    other = dist.new_group(backend=nccl_contract.BACKEND)
    assert other is not None
    x = zeros(2)
    held = dist.all_reduce(x, group=group, async_op=True)  # dropped, it may have ended before the other begins
    dist.all_reduce(x, group=other)
    assert held is not None


def three_communicators_first_used_in_a_circle(group: Group, rank: int) -> None:
    pairs = [dist.new_group(ranks, backend=nccl_contract.BACKEND) for ranks in ([0, 1], [1, 2], [0, 2])]
    mine = {0: (0, 2), 1: (1, 0), 2: (2, 1)}.get(rank, ())
    works = [dist.all_reduce(zeros(2), group=pairs[i], async_op=True) for i in mine]
    for work in works:
        assert work is not None
        work.wait()


def first_used_by_messages_of_two_ranks(group: Group, rank: int) -> None:
    if rank < 2:
        op = dist.irecv if rank else dist.isend
        for work in dist.batch_isend_irecv([dist.P2POp(op, zeros(2), 1 - rank, group=group)]):
            work.wait()
    dist.all_reduce(zeros(2), group=group)


def first_used_by_two_ranks_alone(group: Group, rank: int) -> None:
    if rank < 2:
        dist.batch_isend_irecv([dist.P2POp(dist.irecv if rank else dist.isend, zeros(2), 1 - rank, group=group)])


def left_out_by_one(group: Group, rank: int) -> None:
    if rank != 3:
        dist.all_reduce(zeros(2), group=group)


def calls_after_an_error(group: Group, rank: int) -> None:
    with pytest.raises(dist.DistBackendError, match="one_call"):
        reduced_by_different_operations(group, rank)
    dist.all_reduce(zeros(2), group=group)


WRONG: list[tuple[str, Program, str, set[int]]] = [
    ("buffer", written_before_the_wait, r"the input of all_gather_into_tensor at .*:\d+ was written", {0, 1, 2, 3}),
    ("order", two_communicators_in_two_orders,
     r"rank \d waits in all_reduce at .*:\d+, on group .*, which this rank has not begun", {0, 1, 2, 3}),
    ("order", two_communicators_in_two_orders_at_once,
     r"on ranks \d and \d: rank \d had begun all_reduce at .*:\d+, on group", {0, 1, 2, 3}),
    ("one_call", gathered_unevenly, "all_gather_into_tensor.*'torch.float32', [23]", {0, 1, 2, 3}),
    ("one_call", reduced_by_different_operations, "'MAX'", {0, 1, 2, 3}),
    ("one_call", different_collectives, r"calls broadcast at .*:\d+", {0, 1, 2, 3}),
    ("message", exchanged_with_wrong_sizes, "expects 8 bytes of rank 0, which sends 4", {1}),
    ("order", send_without_its_receive, r"rank 0 had begun send to rank 1 at .*:\d+", {0, 1, 2, 3}),
    ("grouped", both_send_first, "ranks 0 and 1 both send|ranks 1 and 0 both send", {0, 1}),
    ("message", message_of_another_size,
     r"between ranks \d and \d: (8|12) bytes of torch.float32 in .*at .*:\d+, (8|12) of", {0, 1}),
    ("buffer", memory_of_two_communicators, r"uses memory of all_reduce at .*:\d+, not waited for", {0, 1, 2, 3}),
    ("first_call", three_communicators_first_used_in_a_circle, "and not all came within the time limit", {0, 1, 2}),
    ("first_call", first_used_by_messages_of_two_ranks,
     r"calls all_reduce at .*:\d+ .*'first', 'collective'|calls group of messages at", {0, 1, 2, 3}),
    ("first_call", first_used_by_two_ranks_alone, r"waits in group of messages at .*:\d+ for ranks 0, 1, 2, 3", {0, 1}),
    ("", calls_after_an_error, "an earlier operation has failed", {0, 1, 2, 3}),
    ("", left_out_by_one, "not all came within the time limit", {0, 1, 2}),
]  # fmt: skip


def attempt(program: Program, seconds: float) -> str:
    """The error of a program on a group of its own, or ""."""
    nccl_contract.register()
    CURRENT.state = ProcessState()
    put(_FAILED, None)
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSHARD_CONTRACT_SECONDS", str(seconds))
        group = dist.new_group(backend=nccl_contract.BACKEND)
        assert group is not None
        try:
            program(group, dist.get_rank())
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            dist.barrier()
    return ""


def refusals() -> list[str]:
    return [attempt(program, 20) for _, _, program in REFUSED]


def wrong_programs() -> list[str]:
    late = (left_out_by_one, three_communicators_first_used_in_a_circle, first_used_by_two_ranks_alone)
    return [attempt(program, 0.5 if program in late else 20) for _, program, _, _ in WRONG]


def test_calls_that_nccl_refuses_are_refused_before_anything_is_sent(ranks: RankPool) -> None:
    texts = ranks.run(refusals)
    for i, (rule, asked, _) in enumerate(REFUSED):
        for errors in texts:
            assert asked in errors[i], (rule, errors[i])
            assert f"[NCCL contract: {rule}; {RULES[rule].source}]" in errors[i]


@pytest.mark.thorough
def test_programs_that_are_wrong_on_several_ranks_together_are_caught(ranks: RankPool) -> None:
    texts = ranks.run(wrong_programs)
    for i, (rule, program, pattern, where) in enumerate(WRONG):
        for rank in range(4):
            text = texts[rank][i]
            if rank not in where:
                continue
            assert re.search(pattern, text), (program.__name__, rank, text)
            assert not rule or f"[NCCL contract: {rule}; {RULES[rule].source}]" in text
            if rule in ("order", "buffer"):  # names a line of the program
                assert f"{inspect.getsourcefile(program)}:" in text


def test_every_rule_is_broken_by_some_case_and_has_a_source() -> None:
    assert {rule for rule, *_ in (*REFUSED, *WRONG)} - {""} == set(RULES) - {"split"}  # test_nccl_communicators.py
    assert all("/" in rule.source for rule in RULES.values())


# -- programs that are right


def fused_as_in_torch() -> list[str]:
    """The calls of kernels of symmetric memory that differ from torch's own form of them without a GPU."""
    assert dist.group.WORLD is not None
    wrong, name, rank = [], dist.group.WORLD.group_name, dist.get_rank()
    for shape in ((4, 8), (4, 8, 12)):
        x = torch.arange(torch.Size(shape).numel()).view(shape).double() + rank
        x, y = x / 100, torch.linspace(0, 1, 32 * shape[-1]).double().view(-1, 8)
        for dim in range(len(shape)):
            chunk = x.movedim(dim, 0).contiguous().movedim(0, dim) if dim < len(shape) - 1 else x
            right = y if dim == len(shape) - 1 else y[: shape[-1]]
            for returns in (True, False):
                mine, theirs = (
                    kernel(chunk, [right, 2 * right], dim, name, return_A=returns)
                    for kernel in (
                        SYMMETRIC.fused_all_gather_matmul,
                        TORCHS._fused_all_gather_matmul_fallback,
                    )
                )
                pairs = [*zip(mine[1], theirs[1], strict=True), *([(mine[0], theirs[0])] if returns else [])]
                if (mine[0] is None) == returns or not all(torch.allclose(*pair) for pair in pairs):
                    wrong.append(f"gather of {shape} along {dim}")
            for op in ("sum", "avg"):
                mine, theirs = (
                    kernel(x, y[: shape[-1]], op, dim, name)
                    for kernel in (
                        SYMMETRIC.fused_matmul_reduce_scatter,
                        TORCHS._fused_matmul_reduce_scatter_fallback,
                    )
                )
                if not torch.allclose(mine, theirs) or not mine.is_contiguous():
                    wrong.append(f"{op} of {shape} along {dim}")
    return wrong


def test_kernels_of_symmetric_memory_are_those_of_torch() -> None:
    assert rank_pool(4, nccl_contract.BACKEND).run(fused_as_in_torch) == [[]] * 4


def results(group: Group, rank: int) -> list[bool]:
    x, out = torch.full((2,), float(rank)), zeros(8)
    work = group.all_gather_single(out, x)
    early = out.isnan().all().item()
    work.wait()
    whole = torch.arange(4.0).repeat_interleave(2)
    in_place = zeros(8)
    in_place[2 * rank : 2 * rank + 2] = rank
    group.all_gather_single(in_place, in_place[2 * rank : 2 * rank + 2]).wait()
    total = torch.full((3,), rank + 1, dtype=torch.bfloat16)
    dist.all_reduce(total, group=group)
    truth = torch.tensor([rank == 1, False])
    dist.all_reduce(truth, group=group)
    scattered = zeros(2)
    group.reduce_scatter_single(scattered, torch.arange(8.0)).wait()
    uneven = [zeros(i) for i in range(4)]
    dist.all_gather(uneven, torch.full((rank,), float(rank)), group=group)
    swapped = zeros(4)
    dist.all_to_all_single(swapped, torch.arange(4.0) + 10 * rank, group=group)
    ring = zeros(3)
    pairs = [
        dist.P2POp(dist.isend, torch.full((3,), float(rank)), (rank + 1) % 4, group=group),
        dist.P2POp(dist.irecv, ring, (rank - 1) % 4, group=group),
    ]
    for each in dist.batch_isend_irecv(pairs):
        each.wait()
    numbers = torch.full((2,), rank)
    pending = dist.all_reduce(numbers, group=group, async_op=True)
    assert pending is not None
    poisoned = bool((numbers < -(2**40)).all())
    pending.wait()
    within: list[Tensor] = []

    def followed(x: Tensor) -> Tensor:
        within.extend([x.detach().new_zeros(8), x.detach() * 1])
        group.all_gather_single(*within).wait()
        return x.sum()

    torch.func.grad(followed)(x)
    objects: list[object] = [None] * 4
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    return [
        bool(early),
        out.equal(whole),
        in_place.equal(whole),
        total.tolist() == [10.0] * 3,
        truth.tolist() == [True, False],
        scattered.tolist() == [8.0 * rank, 8.0 * rank + 4],
        all(part.eq(i).all() for i, part in enumerate(uneven)),
        swapped.tolist() == [10.0 * i + rank for i in range(4)],
        ring.tolist() == [float((rank - 1) % 4)] * 3,
        poisoned,
        numbers.tolist() == [6, 6],
        unwrapped(within[0]).equal(whole),
        objects == [{"rank": i} for i in range(4)],
    ]


def counted(group: Group, rank: int) -> list[int]:
    before = nccl_contract.usage()
    dist.all_reduce(zeros(4), group=group)
    group._start_coalescing(torch.device("cpu"))
    for _ in range(3):
        group.all_gather_single(zeros(4), zeros(1))
    work = group._end_coalescing(torch.device("cpu"))
    work.wait()
    dist.barrier(group=group)
    after = nccl_contract.usage()
    names = ("kernels", "nbytes", "stream_waits", "host_waits")
    return [getattr(after, name) - getattr(before, name) for name in names]


def value_of(program: Callable[[Group, int], object]) -> object:
    values: list[object] = []
    text = attempt(lambda group, rank: values.append(program(group, rank)), 20)
    assert not text, text
    return values[0]


def right_programs() -> list[object]:
    return [value_of(program) for program in (results, counted)]


def test_right_programs_get_their_results_when_they_wait(ranks: RankPool) -> None:
    for values, counts in ranks.run(right_programs):  # type: ignore[misc]
        assert all(values), values
        assert counts == [3, 16 + 12, 2, 1]
