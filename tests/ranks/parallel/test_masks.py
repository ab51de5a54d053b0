"""Models whose forward pass asks for the values of masks and other inputs are traced, priced, and equal one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.real_models import SIZES, InDouble, batch_of, build, weights_for
from torch import Tensor, nn

import dshard
from dshard import LayoutError, Mesh, Shard, distribute_tensor, plan_model
from dshard.comm import plain
from dshard.parallel import parallelize
from dshard.testing import RankPool, simulated, whole

FAMILIES = ("bert", "llama", "t5")
TOLERANCE = 1e-9


@plain()
def masked_batch(family: str) -> dict[str, Tensor]:
    batch = batch_of(family)
    mask = torch.ones_like(batch["input_ids"])
    mask[1, 5:] = mask[3, 2:] = 0
    return {**batch, "attention_mask": mask}


def errors(family: str, strategy: str, mesh: Any) -> float:
    """The largest error of logits and gradients against one device, with padded sequences in the batch."""
    with plain():
        alone, model = build(family), build(family)
        with InDouble():
            expected = alone(**masked_batch(family)).logits
            (expected * weights_for(expected)).sum().backward()
    parallelize(model, mesh, strategy, **masked_batch(family))
    with InDouble():
        logits = model(**masked_batch(family)).logits
        (logits * distribute_tensor(weights_for(logits), mesh, src_data_rank=None)).sum().backward()
    found = [(whole(logits.detach()) - expected.detach()).abs().max().item()]
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if theirs.grad is not None:
            found.append((whole(mine.grad) - theirs.grad).abs().max().item())
    return max(found)


@pytest.mark.thorough
def test_a_padding_mask_in_the_example() -> None:
    mesh = Mesh((2, 2), ("dp", "tp"))
    with simulated(mesh):
        assert errors("bert", "megatron", mesh) < TOLERANCE


def errors_on_ranks(cases: list[tuple[str, str]]) -> dict[str, float]:
    mesh = dshard.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    return {f"{family} {strategy}": errors(family, strategy, mesh) for family, strategy in cases}


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["megatron", "fsdp", "optimus", "atp", "megatron-sp"])
def test_a_padding_mask_in_the_example_on_real_ranks(ranks: RankPool, strategy: str) -> None:
    for found in ranks.run(errors_on_ranks, [(family, strategy) for family in FAMILIES], timeout=300.0):
        assert max(found.values()) < TOLERANCE, found


@pytest.mark.parametrize("family", ["bert", *(pytest.param(f, marks=pytest.mark.thorough) for f in FAMILIES[1:])])
def test_a_mask_does_not_change_the_plan_of_parameters(family: str) -> None:
    model, mesh = build(family), Mesh((2, 2), ("dp", "tp"))
    plan = plan_model(model, mesh, "megatron", **batch_of(family))
    masked = plan_model(model, mesh, "megatron", **masked_batch(family))

    assert masked.parameters == plan.parameters
    assert any(Shard(0) in placements for placements in masked.parameters.values())
    again = plan_model(model, mesh, masked, **masked_batch(family))
    assert again.cost == masked.cost, "a plan is priced without the trace that made it"


def test_a_mask_without_data_is_named() -> None:
    model, batch = build("bert"), masked_batch("bert")
    batch["attention_mask"] = batch["attention_mask"].to("meta")
    with pytest.raises(LayoutError, match="attention_mask with data, leave it out of the example, or give the pla"):
        plan_model(model, Mesh((2,), ("tp",)), "megatron", **batch)


class Steered(nn.Module):
    """Asks for values of inputs, of what is computed from them in place and not, and of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("limit", torch.tensor(3))

    def forward(self, x: Tensor, *, lengths: Tensor, written: bool = False, weighs: bool = False) -> Tensor:
        longest = int(lengths.max()) if int(self.limit) < 10 else 0
        positions = torch.arange(longest, device=x.device)
        keep = positions < lengths[:, None]
        if written:
            keep[0] = True
        if weighs and self.up(x).sum() > 1e9:
            return x
        x = x[:, :longest]
        for _ in range(2 if keep.all() else 1):
            x = x + self.down(self.up(x).relu())
        return x


def test_questions_about_anything_that_has_data() -> None:
    mesh, x = Mesh((2,), ("tp",)), torch.randn(4, 6, 8)
    model, full, short = Steered(), torch.tensor([5, 5, 5, 5]), torch.tensor([5, 2, 3, 1])
    wide = torch.tensor([1, 5, 5, 5])  # but for the first row
    sent = [plan_model(model, mesh, "megatron", x, lengths=n).cost.nbytes for n in (full, short)]

    assert sent[0] > sent[1] > 0, "two layers or one"
    assert plan_model(model, mesh, "megatron", x, lengths=short, weighs=True).cost.nbytes > 0
    written = [plan_model(model, mesh, "megatron", x, lengths=n, written=True).cost.nbytes for n in (short, wide)]
    assert written == [sent[1], sent[0]], "what is written to the first row is seen"
    with pytest.raises(LayoutError, match="which have no data here"):
        plan_model(Steered().to("meta"), mesh, "megatron", x, lengths=short, weighs=True)


# -- experts as Hugging Face has them, by grouped matmuls


def experts(family: str, dtype: torch.dtype) -> nn.Module:
    import transformers  # noqa: PLC0415 - takes seconds

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    common = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 16, "num_experts_per_tok": 2}
    heads = {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4, "q_lora_rank": 8, "kv_lora_rank": 8}
    routed = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    name, own = {
        "mixtral": ("Mixtral", {"num_local_experts": 4}),
        "gpt_oss": ("GptOss", {"num_local_experts": 4, "head_dim": 4}),
        "qwen3_moe": ("Qwen3Moe", {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 4}),
        "deepseek_v3": ("DeepseekV3", {**heads, **routed, "moe_intermediate_size": 16, "num_key_value_heads": 4}),
    }[family]
    config = getattr(transformers, f"{name}Config")(**{**common, **own})
    return getattr(transformers, f"{name}ForCausalLM")(config).to(dtype)  # type: ignore[no-any-return]


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "qwen3_moe", "deepseek_v3"])
def test_experts_as_they_come(family: str, dtype: torch.dtype) -> None:
    mesh, batch = Mesh((2, 2), ("dp", "tp")), masked_batch("llama")
    alone, model = experts(family, dtype), experts(family, dtype)
    expected = alone(**batch, labels=batch["input_ids"]).loss
    expected.backward()
    plan = plan_model(model, mesh, "megatron", **batch)
    assert plan.parameters["model.layers.1.mlp.experts.down_proj"][1] != dshard.Replicate()
    with simulated(mesh):
        loss = parallelize(model, mesh, plan)(**batch, labels=batch["input_ids"]).loss
        loss.backward()
        limit = 1e-5 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(whole(loss.detach()), expected.detach(), rtol=limit, atol=0)
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            if theirs.grad is not None:
                scale = theirs.grad.abs().max().item()
                torch.testing.assert_close(whole(mine.grad), theirs.grad, rtol=0, atol=limit * scale)


# -- shapes that depend on values


class Selected(nn.Module):
    """Chooses rows by masks, places and numbers, each of which has as many results as the values say."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, mask: Tensor, counts: Tensor) -> Tensor:
        rows = self.up(x)[mask]
        places = mask.nonzero()
        kinds, inverse, sizes = torch.unique(counts, return_inverse=True, return_counts=True)
        numbers = F.one_hot(inverse).double() @ sizes.double() + torch.bincount(counts)[counts].double()
        repeated = x.repeat_interleave(counts, 0).sum() + len(kinds) + len(torch.where(mask)[0]) + places.sum()
        filled = torch.zeros_like(x).to("cpu", x.dtype)
        filled[mask] = self.down(rows.relu())
        flat = torch.masked_select(filled, mask[..., None]).view(-1, 4)
        return flat.sum(-1) * repeated + numbers.sum() + len(range(*rows.shape[:1]))


def selected() -> None:
    torch.set_num_threads(1)
    with plain():
        torch.manual_seed(0)
        alone, x, counts = Selected().double(), torch.randn(5, 3, 4).double(), torch.tensor([2, 0, 1, 3, 1])
        mask = torch.randn(5, 3) > 0
        models = [Selected().double() for _ in range(2)]
        expected = alone(x, mask, counts)
        expected.square().sum().backward()
    mesh = dshard.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    for model, strategy in zip(models, ("fsdp x megatron", "optimus"), strict=True):
        with plain():
            model.load_state_dict(alone.state_dict())
        parallelize(model, mesh, strategy, x, mask, counts)
        out = model(x, mask, counts)
        out.square().sum().backward()
        torch.testing.assert_close(out.full_tensor(), expected, rtol=1e-12, atol=1e-12)
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.ranks
@pytest.mark.filterwarnings("error:.*has no rule")
def test_shapes_that_depend_on_values(ranks: RankPool) -> None:
    ranks.run(selected)


def test_shapes_that_depend_on_values_are_planned_by_an_example_with_data() -> None:
    model, mesh = Selected(), Mesh((2, 2), ("dp", "tp"))
    x, mask, counts = torch.randn(5, 3, 4), torch.ones(5, 3).bool(), torch.arange(5)
    full, few = (plan_model(model, mesh, "megatron", x, m, counts).cost.nbytes for m in (mask, mask.tril(-1)))

    assert full > few > 0, "as many rows are sent as the mask selects"
    with pytest.raises(LayoutError, match="a value that depends on mask: give an example of mask with data, leave it"):
        plan_model(model, mesh, "megatron", x, mask.to("meta"), counts)


class Indexed(nn.Module):
    """A linear layer, and the elements of its result at `index`."""

    def __init__(self, index: object) -> None:
        super().__init__()
        self.linear, self.index = nn.Linear(3, 4), index

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return h[self.index if self.index != "computed" else [h.sum(1) > 0, 1]]


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
@pytest.mark.parametrize(
    "index",
    [
        [[0, 2], [1, 3]],
        [[2, 0]],
        [[1, 2], 3],
        [torch.tensor([0, 1]), [2, 3]],
        [..., 0],
        [],
        ([[0, 2], [1, 3]],),
        [True, False, True, True],
        ([True, False, True, True], 1),
        "computed",
    ],
    ids=str,
)
def test_lists_are_the_indices_that_torch_reads_in_them(index: object) -> None:
    mesh, x = Mesh((2, 2), ("dp", "tp")), torch.randn(4, 3)
    alone = Indexed(index)
    expected = alone(x)
    gradient = torch.autograd.grad(expected.square().sum(), alone.linear.weight)[0]
    with simulated(mesh):
        laid = parallelize(copy.deepcopy(alone), mesh, "data x megatron", x)
        out = laid(x)
        out.square().sum().backward()

        torch.testing.assert_close(whole(out), expected)
        torch.testing.assert_close(whole(laid.linear.weight.grad), gradient)


@pytest.mark.filterwarnings("error:.*has no rule")
def test_masks_among_other_indices() -> None:
    mesh, x = Mesh((2, 2), ("a", "b")), torch.arange(120.0).view(2, 3, 4, 5)
    mask, rows = torch.arange(12).view(3, 4) % 5 == 1, torch.tensor([1, 0, 1])
    with simulated(mesh), dshard.implicit_replication():
        laid = distribute_tensor(x, mesh, [Shard(1), Shard(0)], src_data_rank=None)
        for index in (
            (slice(None), mask),
            (1, mask, 2),
            (..., mask[0], slice(1, 3)),
            (None, ..., mask, 0),
            (rows[:1], mask[:, 1]),
            (x > 50, None),
        ):
            torch.testing.assert_close(whole(laid[index]), x[index], rtol=0, atol=0)
        with dshard.trace() as sent:
            for wrong, size in (((slice(None), mask[:2]), (3, 4)), ((..., mask[0]), (5,)), ((mask,), (2, 3))):
                with pytest.raises(IndexError, match=rf"selects from, \({', '.join(map(str, size))},?\)"):
                    laid[wrong]
                with pytest.raises(IndexError):
                    x[wrong]
        assert not sent.events


def test_sequences_of_distributed_numbers_are_indices() -> None:
    mesh, x = Mesh((2,), ("a",)), torch.arange(24.0).view(4, 6)
    at = torch.tensor([[0, 5], [1, 2], [3, 0]])
    with simulated(mesh):
        laid, laid_at = (distribute_tensor(each, mesh, [Shard(0)], src_data_rank=None) for each in (x, at))
        for read in (
            lambda x, at: x[tuple(zip(*at, strict=True))],
            lambda x, at: x[[*at[:, 0]], 1],
            lambda x, at: x[1, [[*at[:2, 1]], [*at[1:, 1]]]],
            lambda x, at: x[tuple(at[:, 0]), 1:],
        ):
            torch.testing.assert_close(whole(read(laid, laid_at)), read(x, at), rtol=0, atol=0)
        for each, places in ((x, at), (laid, laid_at)):
            rows, columns = zip(*places, strict=True)
            each[rows, columns] = -1
        torch.testing.assert_close(whole(laid), x, rtol=0, atol=0)
