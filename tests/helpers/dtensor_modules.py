"""Modules, styles, losses and errors, for torch's DTensor and for dshard's."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from helpers.dtensor_programs import Library, counts, drawn, line, on_line, program, refused


@program
def modules_with_functions(lib: Library) -> None:
    def partition(name: str, module: nn.Module, mesh: Any) -> None:
        if isinstance(module, nn.Linear):
            for key, value in module.named_parameters():
                module.register_parameter(key, nn.Parameter(lib.distribute_tensor(value, mesh, [lib.Shard(0)])))

    def distributed_input(module: nn.Module, inputs: Any, mesh: Any) -> Any:
        return lib.DTensor.from_local(inputs[0], mesh, [lib.Replicate()])

    def gives(module: nn.Module, outputs: Any, mesh: Any) -> Any:
        return outputs.redistribute(placements=[lib.Replicate()]).to_local()

    torch.manual_seed(0)
    alone = nn.Linear(4, 8)
    model = lib.distribute_module(copy.deepcopy(alone), line(lib), partition, distributed_input, gives)
    assert model.weight.placements == (lib.Shard(0),)
    assert_close(model(drawn(3, 4)), alone(drawn(3, 4)))


@program
def modules_replicated_by_default(lib: Library) -> None:
    torch.manual_seed(0)
    model = lib.distribute_module(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), line(lib))
    for tensor in (*model.parameters(), *model.buffers()):
        assert isinstance(tensor, lib.DTensor)
        assert tensor.placements == (lib.Replicate(),)


@program
def state_dicts_of_modules(lib: Library) -> None:
    torch.manual_seed(0)
    model = lib.distribute_module(nn.Linear(4, 8), line(lib))
    other = lib.distribute_module(nn.Linear(4, 8), line(lib))
    other.load_state_dict(model.state_dict())
    assert_close(other.weight.full_tensor(), model.weight.full_tensor())
    assert isinstance(copy.deepcopy(model).weight, lib.DTensor)


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


@program
def columns_then_rows(lib: Library) -> None:
    alone = Perceptron()
    model = lib.parallelize_module(
        Perceptron(), line(lib), {"up": lib.ColwiseParallel(), "down": lib.RowwiseParallel()}
    )
    out, sent = counts(lib, lambda: model(drawn(4, 8)))
    assert sent == {"all_reduce": 1}
    assert type(out.wait() if hasattr(out, "wait") else out) is Tensor
    out.square().sum().backward()
    alone(drawn(4, 8)).square().sum().backward()
    assert model.up.weight.placements == (lib.Shard(0),)
    assert model.down.weight.placements == (lib.Shard(1),)
    assert_close(model.up.weight.grad.full_tensor(), alone.up.weight.grad, atol=1e-4, rtol=1e-4)
    assert_close(model.down.bias.grad.full_tensor(), alone.down.bias.grad, atol=1e-4, rtol=1e-4)


@program
def parameters_of_modules_that_ran(lib: Library) -> None:
    model = Perceptron()
    model.unused = nn.LayerNorm(8)
    lib.parallelize_module(model, line(lib), {"up": lib.ColwiseParallel(), "down": lib.RowwiseParallel()})
    with lib.CommDebugMode() as comm:
        model(drawn(4, 8))
    assert set(comm.get_parameter_info()) == {"Perceptron.up", "Perceptron.down"}
    assert comm.comm_counts == comm.get_comm_counts()


@program
def sequence_parallel_inputs_and_outputs(lib: Library) -> None:
    alone = Perceptron()
    plan = {
        "up": lib.ColwiseParallel(input_layouts=lib.Shard(0)),
        "down": lib.RowwiseParallel(output_layouts=lib.Shard(0)),
    }
    model = lib.parallelize_module(Perceptron(), line(lib), plan)
    part, sent = counts(lib, lambda: model(drawn(8, 8).chunk(4)[dist.get_rank()]))
    assert sent == {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1}
    assert_close(part + 0, alone(drawn(8, 8)).chunk(4)[dist.get_rank()])


@program
def distributed_outputs_on_request(lib: Library) -> None:
    styles = {"up": lib.ColwiseParallel(use_local_output=False), "down": lib.RowwiseParallel(use_local_output=False)}
    model = lib.parallelize_module(Perceptron(), line(lib), styles)
    assert model.up(drawn(2, 8)).placements == (lib.Shard(1),)
    out = model(drawn(2, 8))
    assert isinstance(out, lib.DTensor)
    assert_close(out.full_tensor(), Perceptron()(drawn(2, 8)))


@program
def styles_by_pattern(lib: Library) -> None:
    model = nn.ModuleDict({"a": Perceptron(), "b": Perceptron()})
    lib.parallelize_module(model, line(lib), {"*.up": lib.ColwiseParallel(), "b.down": lib.RowwiseParallel()})
    assert isinstance(model["a"].up.weight, lib.DTensor)
    assert isinstance(model["b"].down.weight, lib.DTensor)
    assert not isinstance(model["a"].down.weight, lib.DTensor)


@program
def prepared_inputs_and_outputs(lib: Library) -> None:
    styles = {
        "": lib.PrepareModuleInput(input_layouts=lib.Shard(0), desired_input_layouts=lib.Replicate()),
        "up": lib.ColwiseParallel(use_local_output=False),
        "down": lib.RowwiseParallel(use_local_output=False),
    }
    model = Perceptron()
    for path, style in styles.items():
        lib.parallelize_module(model.get_submodule(path), line(lib), style)
    lib.parallelize_module(
        model, line(lib), lib.PrepareModuleOutput(output_layouts=lib.Replicate(), desired_output_layouts=lib.Shard(0))
    )
    part = model(drawn(8, 8).chunk(4)[dist.get_rank()])
    assert_close(part + 0, Perceptron()(drawn(8, 8)).chunk(4)[dist.get_rank()])


@program
def embeddings_with_styles(lib: Library) -> None:
    ids = torch.tensor([[0, 5, 3], [7, 1, 1]])
    for style in (
        lib.ColwiseParallel(output_layouts=lib.Replicate()),
        lib.RowwiseParallel(input_layouts=lib.Replicate()),
    ):
        torch.manual_seed(0)
        alone = nn.Embedding(8, 4)
        model = lib.parallelize_module(copy.deepcopy(alone), line(lib), style)
        assert_close(model(ids) + 0, alone(ids))


@program
def losses_of_sharded_classes(lib: Library) -> None:
    target = torch.tensor([0, 3, 7, 5])
    for reduction in ("mean", "sum", "none"):
        x = on_line(lib, drawn(4, 8), lib.Shard(1)).requires_grad_()
        theirs = drawn(4, 8).requires_grad_()
        with lib.loss_parallel():
            loss = F.cross_entropy(x, target, reduction=reduction)
            loss.sum().backward()
        expected = F.cross_entropy(theirs, target, reduction=reduction)
        expected.sum().backward()
        assert_close(loss.full_tensor() if isinstance(loss, lib.DTensor) else loss, expected)
        assert_close(x.grad.full_tensor(), theirs.grad)


@program
def losses_that_ignore_a_class(lib: Library) -> None:
    target = torch.tensor([0, -100, 7, -100])
    x, theirs = on_line(lib, drawn(4, 8), lib.Shard(1)).requires_grad_(), drawn(4, 8).requires_grad_()
    with lib.loss_parallel():
        F.cross_entropy(x, target).backward()
    F.cross_entropy(theirs, target).backward()
    assert_close(x.grad.full_tensor(), theirs.grad)


@program
def optimizers_over_distributed_parameters(lib: Library) -> None:
    makes = (
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        functools.partial(torch.optim.AdamW, lr=0.1, foreach=True),
        functools.partial(torch.optim.Adam, lr=0.1, amsgrad=True),
        functools.partial(torch.optim.RMSprop, lr=0.1),
    )
    for make in makes:
        models = [lib.distribute_module(Perceptron(), line(lib)), Perceptron()]
        for model, x in zip(models, (on_line(lib, drawn(4, 8), lib.Shard(0)), drawn(4, 8)), strict=True):
            optimizer = make(model.parameters())
            for _ in range(2):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        for mine, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert_close(mine.full_tensor(), theirs, atol=1e-3, rtol=1e-3)


@program
def clipping_by_the_norm_of_all(lib: Library) -> None:
    model = lib.parallelize_module(
        Perceptron(), line(lib), {"up": lib.ColwiseParallel(), "down": lib.RowwiseParallel()}
    )
    alone = Perceptron()
    for net in (model, alone):
        net(drawn(4, 8)).square().sum().backward()
    norms = [nn.utils.clip_grad_norm_(net.parameters(), 1.0) for net in (model, alone)]
    assert_close(norms[0].full_tensor() if isinstance(norms[0], lib.DTensor) else norms[0], norms[1])
    assert_close(model.up.weight.grad.full_tensor(), alone.up.weight.grad, atol=1e-4, rtol=1e-4)


@program
def functions_of_local_tensors(lib: Library) -> None:
    double = lib.local_map(lambda x, n: x * n, out_placements=[lib.Shard(0)], in_placements=([lib.Shard(0)], None))
    x = on_line(lib, drawn(8, 2), lib.Shard(0))
    assert_close(double(x, 2).full_tensor(), 2 * drawn(8, 2))
    total = lib.local_map(
        lambda x: x.sum(0, keepdim=True),
        out_placements=[lib.Partial()],
        in_placements=([lib.Shard(0)],),
        redistribute_inputs=True,
        device_mesh=line(lib),
    )
    assert_close(total(on_line(lib, drawn(8, 2), lib.Replicate())).full_tensor(), drawn(8, 2).sum(0, keepdim=True))


@program
def local_outputs_without_placements_are_replicated(lib: Library) -> None:
    x = on_line(lib, drawn(8, 2), lib.Replicate()).requires_grad_()
    doubled = lib.local_map(lambda x: x * 2)(x)
    tripled, number = lib.local_map(lambda x: (x * 3, 4), out_placements=(None, None))(x)
    assert number == 4
    for y, factor in ((doubled, 2), (tripled, 3)):
        assert y.placements == (lib.Replicate(),)
        assert_close(y.to_local(), factor * drawn(8, 2))
    (doubled + tripled).sum().backward()
    assert_close(x.grad.full_tensor(), torch.full((8, 2), 5.0))


# -- errors


@program
def wrong_numbers_of_placements(lib: Library) -> None:
    both = [lib.Shard(0), lib.Shard(0)]
    refused(lambda: lib.distribute_tensor(torch.ones(4), line(lib), both), ValueError, RuntimeError)


@program
def dims_out_of_range(lib: Library) -> None:
    refused(lambda: on_line(lib, torch.ones(4), lib.Shard(1)), ValueError, RuntimeError, IndexError, AssertionError)


@program
def shapes_that_do_not_fit(lib: Library) -> None:
    x, y = on_line(lib, drawn(8, 4), lib.Shard(0)), on_line(lib, drawn(8, 5), lib.Shard(0))
    refused(lambda: x + y, RuntimeError, ValueError)
    refused(lambda: x @ y, RuntimeError, ValueError)
    refused(lambda: torch.cat([x, y]), RuntimeError, ValueError)


@program
def plain_tensors_among_distributed_ones(lib: Library) -> None:
    refused(lambda: on_line(lib, drawn(8, 4), lib.Shard(0)) + drawn(8, 4), RuntimeError, ValueError)
    with lib.implicit_replication():
        x = on_line(lib, drawn(8, 4), lib.Shard(0)) + drawn(8, 4)
    assert_close(x.full_tensor(), 2 * drawn(8, 4))


@program
def tensors_that_autograd_has_recorded(lib: Library) -> None:
    refused(lambda: on_line(lib, torch.ones(4, requires_grad=True) * 2, lib.Shard(0)), RuntimeError)
