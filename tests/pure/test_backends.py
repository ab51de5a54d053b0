"""The table of what backends can do."""

from __future__ import annotations

import torch

from dshard.comm.backends import FAKE, FAKE_NCCL, GLOO, NCCL, NCCL_CONTRACT, backend_of, default_backend, waits_on_host


def test_a_group_of_several_backends_counts_as_that_of_its_device() -> None:
    assert backend_of("cpu:gloo,cuda:nccl", "cuda") is NCCL
    assert backend_of("cpu:gloo,cuda:nccl", "cpu") is GLOO
    assert backend_of("nccl", "cuda") is NCCL
    assert backend_of("fake", "cpu") is FAKE
    assert backend_of("fake", "cuda") is backend_of("cpu:gloo,cuda:fake", "cuda") is FAKE_NCCL


def test_unknown_backends_get_what_every_backend_can_do() -> None:
    ucc = backend_of("ucc", "cpu")

    assert ucc is backend_of("ucc", "cuda")
    assert (ucc.name, ucc.tags, ucc.waits_on_host, ucc.scatters) == ("ucc", True, False, False)


def test_the_contract_on_cpu_tensors_has_the_ways_of_nccl() -> None:
    named = backend_of("nccl_contract", "cpu")

    assert named is NCCL_CONTRACT
    assert {
        field: (getattr(NCCL, field), getattr(named, field))
        for field in NCCL.__slots__
        if field != "name" and getattr(NCCL, field) != getattr(named, field)
    } == {}


def test_half_precision_is_summed_by_nccl_alone() -> None:
    assert torch.bfloat16 in NCCL.sums
    assert torch.bfloat16 not in GLOO.sums


def test_without_processes_the_device_decides() -> None:
    assert default_backend("cpu") is GLOO
    assert default_backend("cuda") is NCCL


def test_failures_are_published_where_some_wait_stops_the_host() -> None:
    assert waits_on_host("gloo")
    assert waits_on_host("cpu:gloo,cuda:nccl")
    assert not waits_on_host("nccl")
