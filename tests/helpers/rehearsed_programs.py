"""Programs around a small model, each of which uses it in another way: rehearsed, they do what they do by Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import dshard
from dshard import DTensor, Shard, distribute_tensor, init_device_mesh, parallelize

WIDTH, ROWS, STEPS = 8, 8, 9
Step = Callable[[Any, Tensor, int], list[Any]]
Make = Callable[[], Any]
PROGRAMS: dict[str, Callable[[], tuple[Make, Step]]] = {}


def program(make: Callable[[], tuple[Make, Step]]) -> Callable[[], tuple[Make, Step]]:
    PROGRAMS[make.__name__] = make
    return make


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.n = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.flag: Any = 0
        self.kept: Any = None

    def hidden(self, x: Tensor) -> Tensor:
        return self.a(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.gelu(self.hidden(x)))


def squares(model: Any, x: Tensor, i: int = 0) -> list[Any]:
    loss = model(x).square().mean()
    loss.backward()
    return [loss]


def of_hidden(change: Callable[[Any, Tensor], Tensor], step: Step = squares) -> tuple[Make, Step]:
    """A model that changes its hidden values, and a step."""

    class Changed(Model):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(F.gelu(change(self, self.a(x))))

    return Changed, step


def with_flag(*steps: int) -> Step:
    """A step that sets the flag of the model at some steps."""

    def step(model: Any, x: Tensor, i: int) -> list[Any]:
        model.flag = i in steps
        return squares(model, x)

    return step


@program
def loss_outside() -> tuple[Make, Step]:
    class Normed(Model):
        def hidden(self, x: Tensor) -> Tensor:
            return self.n(self.a(x))

    return Normed, squares


@program
def accumulation() -> tuple[Make, Step]:
    return Model, lambda model, x, i: squares(model, x) + squares(model, x * 2)


def differentiable(model: Any, x: Tensor) -> Any:
    """A batch that needs a gradient."""
    mesh = model.a.weight.device_mesh
    rows = [Shard(0) if name == "dp" else dshard.Replicate() for name in mesh.mesh_dim_names]
    return distribute_tensor(x, mesh, rows).requires_grad_()


@program
def input_needs_gradient() -> tuple[Make, Step]:
    def step(model: Any, x: Tensor, i: int) -> list[Any]:
        z = differentiable(model, x)
        loss = model(z * 2).square().mean()
        loss.backward()
        return [loss, z.grad]

    return Model, step


class Chained(Model):
    """A product of a product: what the first gives is read for gradients of weights alone."""

    def hidden(self, x: Tensor) -> Tensor:
        return self.b(self.a(self.n(x)))


@program
def gradients_of_an_input_once() -> tuple[Make, Step]:
    """A run ends while no backward pass is known but one that reads less than its own."""

    def step(model: Any, x: Tensor, i: int) -> list[Any]:
        z, weights = differentiable(model, x), [*model.parameters()]
        if i < 2:
            return [model(z).detach()]
        before, now = model(z), model(z)
        grads = torch.autograd.grad(now.square().mean(), [z])
        after = model(z)
        return [*grads, *(g for y in (before, after) for g in torch.autograd.grad(y.square().mean(), weights))]

    return Chained, step


@program
def tied_weights() -> tuple[Make, Step]:
    class Tied(Model):
        def __init__(self) -> None:
            super().__init__()
            self.b.weight = self.a.weight

    return Tied, squares


class Keeping(Model):
    interrupted = False

    def forward(self, x: Tensor) -> Tensor:
        self.kept = h = self.a(x)
        if self.interrupted:
            raise KeyboardInterrupt
        return self.b(F.gelu(h))


@program
def kept_intermediate() -> tuple[Make, Step]:
    def step(model: Any, x: Tensor, i: int) -> list[Any]:
        loss = model(x).square().mean() + model.kept.abs().sum() * 0.1
        loss.backward()
        return [loss, model.kept]

    return Keeping, step


@program
def kept_every_other_step() -> tuple[Make, Step]:
    def step(model: Any, x: Tensor, i: int) -> list[Any]:
        loss = model(x).square().mean()
        if i % 2:
            loss = loss + model.kept.abs().sum() * 0.1
        loss.backward()
        return [loss, model.kept]

    return Keeping, step


@program
def kept_in_a_list_over_steps() -> tuple[Make, Step]:
    def step(model: Any, x: Tensor, i: int) -> list[Any]:
        out = squares(model, x)
        model.flag = [*(model.flag or []), model.kept]
        return out + model.flag[-3:]

    return Keeping, step


@program
def forward_hook_changes_output() -> tuple[Make, Step]:
    def make() -> Model:
        model = Model()
        model.flag = 1.0
        model.a.register_forward_hook(lambda module, args, out: out * model.flag)
        return model

    def step(model: Any, x: Tensor, i: int) -> list[Any]:
        model.flag = 1.0 if i < 5 else 2.0
        return squares(model, x)

    return make, step


@program
def branch_on_an_attribute() -> tuple[Make, Step]:
    return of_hidden(lambda model, h: torch.relu(h) if model.flag else F.gelu(h), with_flag(4, 7))


@program
def number_in_a_dict() -> tuple[Make, Step]:
    options = {"scale": 1.0}

    def step(model: Any, x: Tensor, i: int) -> list[Any]:
        options["scale"] = 0.5 * (1 + i // 3)
        return squares(model, x)

    return of_hidden(lambda model, h: h * options["scale"], step)


@program
def exchanged_function() -> tuple[Make, Step]:
    class Activated(Model):
        activation = staticmethod(F.gelu)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.activation(self.a(x)))

    def step(model: Any, x: Tensor, i: int) -> list[Any]:
        model.activation = F.silu if i >= 4 else F.gelu
        return squares(model, x)

    return Activated, step


@program
def plain_attribute_changes() -> tuple[Make, Step]:
    class Scaled(Model):
        scale = torch.ones(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(F.gelu(self.a(x) * self.scale))

    def step(model: Any, x: Tensor, i: int) -> list[Any]:
        model.scale = torch.full((WIDTH,), 1.0 + i)
        return squares(model, x)

    return Scaled, step


@program
def plain_operand_is_overwritten() -> tuple[Make, Step]:
    class Overwriting(Model):
        def forward(self, x: Tensor) -> Tensor:
            t = torch.ones(WIDTH)
            h = self.a(x) * t
            t.fill_(5.0)
            return self.b(F.gelu(h)) * t

    return Overwriting, raises(squares)


def raises(step: Step) -> Step:
    """A step whose result says whether it raised a RuntimeError."""

    def tried(model: Any, x: Tensor, i: int) -> list[Any]:
        try:
            return step(model, x, i)
        except RuntimeError as error:
            if not ("inplace" in str(error) or "second time" in str(error)):
                raise
            model.zero_grad()
            return [torch.ones(1)]

    return tried


@program
def dropout() -> tuple[Make, Step]:
    return of_hidden(lambda model, h: F.dropout(h, 0.3, model.training))


@program
def evaluation_without_gradients() -> tuple[Make, Step]:
    def step(model: Any, x: Tensor, i: int) -> list[Any]:
        out = squares(model, x)
        model.eval()
        with torch.no_grad():
            out.append(model(x))
        model.train()
        return out

    return Model, step


@program
def evaluation_in_inference_mode() -> tuple[Make, Step]:
    def step(model: Any, x: Tensor, i: int) -> list[Any]:
        with torch.inference_mode():
            out = model(x).full_tensor().clone()
        return [*squares(model, x), torch.tensor(out.tolist())]

    return Model, step


@program
def twice_before_backward() -> tuple[Make, Step]:
    def step(model: Any, x: Tensor, i: int) -> list[Any]:
        a, b = model(x), model(x + 1)
        loss = (a * b).mean()
        loss.backward()
        return [loss, a, b]

    return Model, step


@program
def retained_graph() -> tuple[Make, Step]:
    def step(model: Any, x: Tensor, i: int) -> list[Any]:
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return [loss]

    return Model, step


@program
def created_graph() -> tuple[Make, Step]:
    def step(model: Any, x: Tensor, i: int) -> list[Any]:
        loss = model(x).square().mean()
        grads = torch.autograd.grad(loss, [*model.parameters()], create_graph=True, allow_unused=True)
        penalty = sum(grad.square().sum() for grad in grads if grad is not None)
        penalty.backward()
        return [loss, penalty]

    return Model, step


@program
def created_graph_of_attention() -> tuple[Make, Step]:
    """By the kernel that can be differentiated twice, which the program chooses for the forward pass alone."""

    class Attending(Model):
        def hidden(self, x: Tensor) -> Tensor:
            q = self.a(x).view(4, 2, 4, 2).transpose(1, 2)
            with sdpa_kernel(SDPBackend.MATH):
                return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(x.shape)

    def step(model: Any, x: Tensor, i: int) -> list[Any]:
        return created_graph()[1](model, x, i) if i == 5 else squares(model, x)

    return Attending, step


@program
def second_backward_raises() -> tuple[Make, Step]:
    def step(model: Any, x: Tensor, i: int) -> list[Any]:
        loss = model(x).square().mean()
        loss.backward()
        loss.backward()
        return [loss]

    return Model, raises(step)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3 + ctx.saved_tensors[0] * 0


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


@program
def custom_function() -> tuple[Make, Step]:
    return of_hidden(lambda model, h: Double.apply(h))


@program
def custom_function_appears_late() -> tuple[Make, Step]:
    return of_hidden(lambda model, h: Double.apply(h) if model.flag else h * 2, with_flag(4, 5, 8))


@program
def custom_identity_appears_late() -> tuple[Make, Step]:
    return of_hidden(lambda model, h: Reverse.apply(h) if model.flag else h, with_flag(4, 5, 8))


@program
def number_read_in_the_middle() -> tuple[Make, Step]:
    return of_hidden(lambda model, h: h * (1.0 if h.detach().sum().item() > 0 else 2.0))


@program
def values_read_in_the_middle() -> tuple[Make, Step]:
    return of_hidden(lambda model, h: h * (1.0 if _values(h).sum().item() > 0 else 2.0))  # type: ignore[union-attr]


@program
def writes_to_activations() -> tuple[Make, Step]:
    class Writing(Model):
        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x) + 1
            h.mul_(2)
            h[:, 0] = 0
            return self.b(F.relu(h, inplace=True))

    return Writing, squares


@program
def writes_to_a_plain_sum_in_turn() -> tuple[Make, Step]:
    """What was added is written to again: no gradient reads it."""

    def change(model: Any, x: Tensor) -> Tensor:
        total = torch.zeros(x.shape, dtype=x.dtype)
        total[:] = total + x
        total[:] = total + model.n(x)
        return total

    return of_hidden(change)


@program
def writes_to_a_view() -> tuple[Make, Step]:
    class Writing(Model):
        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x) + 1
            v = h[:, 0]
            w = h.view(-1, 4, WIDTH // 4)
            v.zero_()
            w[:, 1].mul_(3)
            return self.b(F.gelu(h))

    return Writing, squares


@program
def writes_to_a_result_and_its_view() -> tuple[Make, Step]:
    class Both(Model):
        def forward(self, x: Tensor) -> Any:
            h = self.hidden(x)
            return h, h[:2]

    def step(model: Any, x: Tensor, i: int) -> list[Any]:
        h, part = model(x)
        if i % 3:
            (h if i % 3 == 1 else part).mul_(3)
        loss = h.square().mean() + part.sum()
        loss.backward()
        return [loss]

    return Both, step


class Packed(Model):
    """Parts of one product: under "megatron" they do not begin where the parts of ranks do, and are copies."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        whole = self.packed(x)
        q, k, v = whole.chunk(3, -1)
        heads = q.view(ROWS, 2, WIDTH // 2).transpose(0, 1).reshape(ROWS, WIDTH)
        return self.b(F.gelu(heads * k + v))


@program
def parts_of_a_packed_product() -> tuple[Make, Step]:
    return Packed, squares


@program
def writes_to_a_product_and_its_part() -> tuple[Make, Step]:
    class Kept(Packed):
        def forward(self, x: Tensor) -> Tensor:
            whole = self.packed(x)
            self.kept = whole, whole[:, 5:13]
            return self.b(whole[:, 3:11] + self.kept[1])

    def step(model: Any, x: Tensor, i: int) -> list[Any]:
        y = model(x)
        whole, part = model.kept
        (whole if i % 2 else part).mul_(2)
        loss = y.square().mean() + whole.square().mean() + part.sum()
        loss.backward()
        return [loss, part, whole]

    return Kept, step


def of_cuts(change: Callable[[Tensor, Tensor], Tensor], numbers: list[list[int]]) -> tuple[Make, Step]:
    """A model whose calls depend on the numbers of a plain tensor, and a step that gives it others each time."""

    class Cut(Model):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(change(self.a(x), torch.tensor(numbers[self.flag])))

    def step(model: Any, x: Tensor, i: int) -> list[Any]:
        model.flag = i % len(numbers)
        return squares(model, x)

    return Cut, step


@program
def cuts_in_a_tensor() -> tuple[Make, Step]:
    def change(h: Tensor, cuts: Tensor) -> Tensor:
        return torch.cat([part * (i + 1) for i, part in enumerate(h.tensor_split(cuts, 1))], 1)

    return of_cuts(change, [[2, 5], [1, 3], [4, 6]])


@program
def lengths_of_sequences() -> tuple[Make, Step]:
    def change(h: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(h.unflatten(0, (2, -1)), lengths, batch_first=True)
        return pad_packed_sequence(packed, batch_first=True, total_length=ROWS // 2)[0].flatten(0, 1)

    return of_cuts(change, [[4, 2], [4, 1], [3, 3]])


@program
def batch_norm() -> tuple[Make, Step]:
    class Normed(Model):
        def __init__(self) -> None:
            super().__init__()
            self.bn = nn.BatchNorm1d(WIDTH)

        def hidden(self, x: Tensor) -> Tensor:
            return self.bn(self.a(x))

    return Normed, lambda model, x, i: [*squares(model, x), *model.buffers()]


@program
def exception_in_the_middle() -> tuple[Make, Step]:
    class Raising(Model):
        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            if self.flag:
                raise ValueError("no")
            return self.b(F.gelu(h))

    def step(model: Any, x: Tensor, i: int) -> list[Any]:
        model.flag = i == 4
        try:
            return squares(model, x)
        except ValueError:
            model.flag = False
            return squares(model, x)

    return Raising, step


@program
def checkpointed() -> tuple[Make, Step]:
    class Checkpointed(Model):
        def forward(self, x: Tensor) -> Tensor:
            h = checkpoint(lambda z: F.gelu(self.n(self.a(z))), x, use_reentrant=False)
            return self.b(h)

    return Checkpointed, squares


@program
def checkpointed_with_dropout() -> tuple[Make, Step]:
    class Checkpointed(Model):
        def forward(self, x: Tensor) -> Tensor:
            h = checkpoint(lambda z: F.dropout(F.gelu(self.n(self.a(z))), 0.3), x, use_reentrant=False)
            return self.b(h)

    return Checkpointed, squares


@program
def checkpointed_at_times() -> tuple[Make, Step]:
    class Checkpointed(Model):
        def block(self, x: Tensor) -> Tensor:
            return F.gelu(self.n(self.a(x)))

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.block(x) if self.flag else checkpoint(self.block, x, use_reentrant=False))

    return Checkpointed, with_flag(4, 5, 8)


@program
def checkpointed_calls_change() -> tuple[Make, Step]:
    """Some calls of a checkpoint are those of the record, and others run by Python."""

    class Changing(Model):
        def block(self, x: Tensor) -> Tensor:
            h = self.n(self.a(x))
            return (torch.tanh(h).relu() if self.flag else F.gelu(h)) * torch.sigmoid(h)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(checkpoint(self.block, checkpoint(self.block, x, use_reentrant=False), use_reentrant=False))

    return Changing, with_flag(4, 5, 8)


@program
def a_checkpoint_ends_with_what_it_saves() -> tuple[Make, Step]:
    """So its result is read by the next layer's gradient before, and made again after."""

    class Saved(Model):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(checkpoint(lambda z: self.a(z).tanh().relu(), x, use_reentrant=False))

    return Saved, squares


@program
def checkpoints_in_a_checkpoint() -> tuple[Make, Step]:
    """Some calls of the inner one are those of the record, and others run by Python; calls of the outer one follow."""

    class Nested(Model):
        def inner(self, x: Tensor) -> Tensor:
            h = self.n(self.a(x))
            return (torch.tanh(h).relu() if self.flag else F.gelu(h)) * torch.sigmoid(h)

        def outer(self, x: Tensor) -> Tensor:
            h = checkpoint(self.inner, x.sigmoid(), use_reentrant=False)
            return checkpoint(self.inner, h.tanh(), use_reentrant=False) * h.sin()

        def forward(self, x: Tensor) -> Tensor:
            return self.b(checkpoint(self.outer, x, use_reentrant=False))

    return Nested, with_flag(4, 5, 8)


@program
def a_checkpoint_ends_with_one() -> tuple[Make, Step]:
    class Nested(Model):
        def outer(self, x: Tensor) -> Tensor:
            return checkpoint(lambda y: F.gelu(self.n(y)), F.gelu(self.a(x)), use_reentrant=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(checkpoint(self.outer, x, use_reentrant=False))

    return Nested, squares


@program
def a_record_ends_within_a_checkpoint() -> tuple[Make, Step]:
    class Parts(Model):
        def block(self, x: Tensor) -> Tensor:
            h = self.n(self.a(x)).sigmoid()
            return Double.apply(h) * h.tanh()

        def forward(self, x: Tensor) -> Tensor:
            return self.b(checkpoint(self.block, self.a(x), use_reentrant=False))

    return Parts, squares


@program
def checkpointed_reentrant() -> tuple[Make, Step]:
    class Checkpointed(Model):
        def forward(self, x: Tensor) -> Tensor:
            h = checkpoint(lambda z: F.gelu(self.n(self.a(z))), self.a(x), use_reentrant=True)
            return self.b(h)

    return Checkpointed, squares


@program
def bags_of_rows() -> tuple[Make, Step]:
    """Its backward pass reads numbers that torch makes of nothing, and counts as written to."""

    def looked_up(self: Model, h: Tensor) -> Tensor:
        return h + F.embedding_bag(h.detach().abs().long().clamp(max=WIDTH - 1), self.a.weight, mode="mean")

    return of_hidden(looked_up)


@program
def checkpointed_as_a_whole() -> tuple[Make, Step]:
    """A checkpoint around the model, and around the model with what follows it: torch runs again what ran before."""

    def step(model: Any, x: Tensor, i: int) -> list[Any]:
        ways = [model, lambda z: torch.tanh(model(z)).sigmoid()] * (1 + i % 2)
        loss: Any = sum(checkpoint(each, x, use_reentrant=False).square().mean() for each in ways)
        loss.backward()
        return [loss, *squares(model, x)]

    return Model, step


def _hooked(model: Any, h: Tensor) -> Tensor:
    if h.requires_grad:
        h.register_hook(lambda grad: grad * 2)
    return h


@program
def hook_on_an_activation() -> tuple[Make, Step]:
    return of_hidden(_hooked)


@program
def hook_on_a_used_activation() -> tuple[Make, Step]:
    class Hooked(Model):
        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            y = F.gelu(h)
            _hooked(self, h)
            return self.b(y) + h

    return Hooked, squares


@program
def hook_on_a_used_activation_appears_late() -> tuple[Make, Step]:
    def step(model: Any, x: Tensor, i: int) -> list[Any]:
        out = model(x)
        if i in (4, 5, 7):
            model.kept.register_hook(lambda grad: grad * 2)
        loss = out.square().mean()
        loss.backward()
        return [loss]

    return Keeping, step


@program
def kept_gradient_of_an_activation() -> tuple[Make, Step]:
    def step(model: Any, x: Tensor, i: int) -> list[Any]:
        out = model(x)
        model.kept.retain_grad()
        loss = out.square().mean()
        loss.backward()
        return [loss, model.kept.grad]

    return Keeping, step


@program
def gradient_for_an_activation() -> tuple[Make, Step]:
    def step(model: Any, x: Tensor, i: int) -> list[Any]:
        loss = model(x).square().mean()
        return [loss, *torch.autograd.grad(loss, [model.kept])]

    return Keeping, step


@program
def gradient_for_the_edge_to_an_activation() -> tuple[Make, Step]:
    def step(model: Any, x: Tensor, i: int) -> list[Any]:
        loss = model(x).square().mean()
        edge = get_gradient_edge(model.kept)
        (first,) = torch.autograd.grad(loss, edge, retain_graph=True)
        return [loss, first, *torch.autograd.grad(loss, [edge, model.kept])]

    return Keeping, step


@program
def gradients_of_parameters() -> tuple[Make, Step]:
    def step(model: Any, x: Tensor, i: int) -> list[Any]:
        y = model(x)
        parameters = [*model.a.parameters(), *model.b.parameters()]
        first = torch.autograd.grad(y.square().mean(), parameters, retain_graph=True)
        return [*first, *torch.autograd.grad(y.mean(), parameters[:2])]

    return Model, step


@program
def hooks_of_leaves_that_a_step_does_not_use() -> tuple[Make, Step]:
    class Exits(Model):
        def forward(self, x: Tensor) -> Tensor:
            h = F.gelu(self.a(x))
            return h if self.flag else self.b(h)

    def double(x: Tensor) -> None:
        assert x.grad is not None
        x.grad.mul_(2)

    def step(model: Any, x: Tensor, i: int) -> list[Any]:
        if i == 0:
            model.b.weight.register_hook(lambda grad: grad * 2)
            model.b.bias.register_post_accumulate_grad_hook(double)
        model.flag = i in (4, 5, 8)
        return squares(model, x)

    return Exits, step


@program
def weights_are_thawed() -> tuple[Make, Step]:
    """A hook on a weight is called again once the weight is no longer frozen."""

    def step(model: Any, x: Tensor, i: int) -> list[Any]:
        if i == 0:
            model.a.weight.register_hook(lambda grad: grad * 3)
        model.a.requires_grad_(i in (0, 5, 6, 7))
        return squares(model, x)

    return Model, step


@program
def hook_on_the_node_of_an_activation() -> tuple[Make, Step]:
    """As `register_backward_hook` registers it with the result of a module that it finds."""

    def double(into: Any, grads: Any) -> Any:
        return tuple([x if x is None else x * 2 for x in into])

    def change(model: Any, h: Tensor) -> Tensor:
        h = h.sin()
        assert h.grad_fn is not None
        h.grad_fn.register_hook(double)
        return h

    return of_hidden(change)


@program
def hook_on_a_parameter() -> tuple[Make, Step]:
    def step(model: Any, x: Tensor, i: int) -> list[Any]:
        if i == 4:
            model.a.weight.register_hook(lambda grad: grad * 3)
        return squares(model, x)

    return Model, step


@program
def hooks_of_accumulation() -> tuple[Make, Step]:
    """Hooks of the node that accumulates a parameter's gradient, and one behind that of another parameter."""

    def step(model: Any, x: Tensor, i: int) -> list[Any]:
        weight = model.a.weight
        if i == 0:
            model.seen, model.node = [], weight.view_as(weight).grad_fn.next_functions[0][0]
        if i == 4:
            model.node.register_prehook(lambda grads: (grads[0] * 2,))
        if i == 5:
            model.node.register_hook(lambda into, grads: model.seen.append(grads[0].full_tensor().norm()))
        if i == 6:
            model.b.weight.register_post_accumulate_grad_hook(lambda x: setattr(x, "grad", x.grad * 3))
        return [*squares(model, x), *model.seen]

    return Model, step


@program
def parameters_change() -> tuple[Make, Step]:
    def step(model: Any, x: Tensor, i: int) -> list[Any]:
        if i == 4:
            model.a.weight.data.mul_(2)
        if i == 5:
            model.a.weight = nn.Parameter(model.a.weight.detach() * 0.5)
        if i == 6:
            model.b.bias.requires_grad_(False)
        return squares(model, x)

    return Model, step


@program
def weights_are_written_before_backward() -> tuple[Make, Step]:
    def step(model: Any, x: Tensor, i: int) -> list[Any]:
        out = model(x)
        with torch.no_grad():
            model.b.weight.add_(1)
        out.square().mean().backward()
        return [torch.zeros(1)]

    return Model, raises(step)


@program
def result_is_written_before_backward() -> tuple[Make, Step]:
    class Activated(Model):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sigmoid(self.a(x))

    def step(model: Any, x: Tensor, i: int) -> list[Any]:
        out = model(x)
        loss = out.square().mean()
        with torch.no_grad():
            out.add_(1)
        loss.backward()
        return [torch.zeros(1)]

    return Activated, raises(step)


@program
def optimizer_steps() -> tuple[Make, Step]:
    def step(model: Any, x: Tensor, i: int) -> list[Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        out = squares(model, x)
        optimizer.step()
        return [*out, *model.parameters()]

    return Model, step


def _local(model: Any, h: Any) -> Any:
    if not isinstance(h, DTensor):
        return h * 2
    return DTensor.from_local(h.to_local() * 2, h.device_mesh, h.placements)


@program
def local_code_in_the_middle() -> tuple[Make, Step]:
    return of_hidden(_local)


@program
def zeros_signs_and_types_of_numbers() -> tuple[Make, Step]:
    class Scaled(Model):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(F.gelu(self.a(x))) * self.flag

    def step(model: Any, x: Tensor, i: int) -> list[Any]:
        model.flag = [1, 1, 1, True, 1.0, 0.0, -0.0, float("nan"), 1][i]
        out = model(x)
        out.sum().backward()
        return [out, 1 / out]

    return Scaled, step


@program
def autocast_appears_late() -> tuple[Make, Step]:
    class Cast(Model):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=bool(self.flag), dtype=torch.bfloat16):
                return self.b(F.gelu(self.a(x))).float()

    return Cast, with_flag(4, 5)


@program
def autocast_around_the_model() -> tuple[Make, Step]:
    def step(model: Any, x: Tensor, i: int) -> list[Any]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
        loss = out.float().square().mean()
        loss.backward()
        return [loss]

    return Model, step


@program
def gradients_are_off_in_a_block() -> tuple[Make, Step]:
    class Off(Model):
        def forward(self, x: Tensor) -> Tensor:
            with torch.set_grad_enabled(not self.flag):
                h = self.a(x)
            return self.b(F.gelu(h))

    return Off, with_flag(4, 5)


def _rank() -> int:
    return torch.distributed.get_rank()


@program
def one_rank_reads_a_value() -> tuple[Make, Step]:
    def reading(model: Any, h: Any) -> Tensor:
        if model.flag and isinstance(h, DTensor) and _rank() == 0:
            model.kept = h.detach().to_local().sum().item()
        return h

    return of_hidden(reading, with_flag(4, 7))


@program
def one_rank_makes_an_extra_local_call() -> tuple[Make, Step]:
    def extra(model: Any, h: Any) -> Tensor:
        if model.flag and _rank() == 0:
            model.kept = h.detach() * 2
        return h

    return of_hidden(extra, with_flag(1, 2, 4, 7))


@program
def one_rank_stops_making_an_extra_local_call() -> tuple[Make, Step]:
    def extra(model: Any, h: Any) -> Tensor:
        if model.flag and _rank() == 0:
            model.kept = h.detach() * 2
        return h

    return of_hidden(extra, with_flag(0, 1, 2, 3))


# -- gradients of a leaf from several runs, and from outside of the model


@program
def real_and_made() -> tuple[Make, Step]:
    """A discriminator: two batches of different sizes, one backward pass."""

    def step(model: Any, x: Tensor, i: int) -> list[Any]:
        loss = model(x).square().mean() + model(torch.cat([x, x + 1]).detach()).abs().mean()
        loss.backward()
        return [loss]

    return Model, step


@program
def siamese() -> tuple[Make, Step]:
    class Siamese(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Model()
            self.a, self.b = self.part.a, self.part.b

        def forward(self, x: Tensor) -> Tensor:
            return self.part(x) - self.part(x.flip(0))

    return Siamese, squares


@program
def inner_and_outer() -> tuple[Make, Step]:
    """An inner step within the graph of the outer one."""

    def step(model: Any, x: Tensor, i: int) -> list[Any]:
        names, parameters = zip(*model.named_parameters(), strict=True)
        inner = model(x).square().mean()
        grads = torch.autograd.grad(inner, parameters, create_graph=True, allow_unused=True)
        moved = {
            name: p if grad is None else p - 0.1 * grad for name, p, grad in zip(names, parameters, grads, strict=True)
        }
        outer = torch.func.functional_call(model, moved, (x + 1,)).square().mean() + model(x * 2).abs().mean()
        outer.backward()
        return [inner, outer]

    return Model, step


@program
def once_without_recording() -> tuple[Make, Step]:
    def step(model: Any, x: Tensor, i: int) -> list[Any]:
        with torch.no_grad():
            target = model(x + 1)
        loss = (model(x) - target).square().mean() + model(x * 2).mean()
        loss.backward()
        return [loss]

    return Model, step


@program
def penalty_of_parameters() -> tuple[Make, Step]:
    def step(model: Any, x: Tensor, i: int) -> list[Any]:
        loss = model(x).square().mean()
        if i != 5:
            loss = loss + 0.01 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        return [loss]

    return Model, step


@program
def a_weight_used_in_the_loss() -> tuple[Make, Step]:
    def step(model: Any, x: Tensor, i: int) -> list[Any]:
        y = model(x)
        loss = y.square().mean() + (F.linear(y, model.b.weight).square().mean() if i % 4 else 0)
        loss.backward()
        return [loss]

    return Model, step


@program
def a_weight_used_before() -> tuple[Make, Step]:
    def step(model: Any, x: Tensor, i: int) -> list[Any]:
        loss = model(F.linear(x, model.a.weight)).square().mean()
        loss.backward()
        return [loss]

    return Model, step


@program
def a_function_of_a_leaf() -> tuple[Make, Step]:
    """A function of the program's own, of which only autograd knows that it uses a parameter."""

    def step(model: Any, x: Tensor, i: int) -> list[Any]:
        loss = model(x).square().mean() + (Double.apply(model.b.weight).square().mean() if i > 2 else 0)
        loss.backward()
        return [loss]

    return Model, step


@program
def hooks_beside_several_runs() -> tuple[Make, Step]:
    def double(x: Tensor) -> None:
        assert x.grad is not None
        x.grad.mul_(2)

    def step(model: Any, x: Tensor, i: int) -> list[Any]:
        if i == 4:
            model.a.weight.register_hook(lambda grad: grad * 2)
            model.b.bias.register_post_accumulate_grad_hook(double)
        loss = model(x).square().mean() + model(x[:4]).mean()
        loss.backward()
        return [loss, *torch.autograd.grad(model(x).sum() + model(x + 1).sum(), [*model.a.parameters()])]

    return Model, step


@program
def one_rank_makes_calls_everywhere() -> tuple[Make, Step]:
    """Local calls of one rank at random moments: before, within, between and after modules, and very many."""

    class Talking(Model):
        random, often = None, False

        def forward(self, x: Tensor) -> Tensor:
            h = local_calls(self, self.a(x))
            return local_calls(self, self.b(local_calls(self, F.gelu(h))))

    def step(model: Any, x: Tensor, i: int) -> list[Any]:
        model.random = Random(i) if _rank() == 0 and i not in (3, 6) else None
        model.often = i == 5
        local_calls(model, model.a.weight)
        y = model(x)
        local_calls(model, y)
        with torch.no_grad():
            local_calls(model, model(x))
        z = model(x + 1)
        loss = y.square().mean() + z.mean()
        local_calls(model, loss)
        loss.backward()
        local_calls(model, model.a.weight.grad)
        return [loss]

    return Talking, step


def local_calls(model: Any, h: Any) -> Any:
    """Calls that send nothing, of which nothing is used."""
    if model.random is not None and isinstance(h, DTensor):
        for _ in range(100 if model.often else model.random.choice([0, 1, 2])):
            model.random.choice(
                [lambda: str(h.shape), lambda: h * 2, lambda: h.detach().relu(), lambda: h.to_local().sum().item()]
            )()
    return h


# -- running them


class Outcome(NamedTuple):
    """The steps that differ from eager ones, and what the rehearsal says."""

    wrong: list[str]
    answered: int
    calls: int
    seen: str
    why_not: list[str]


def _values(x: Any) -> Tensor | None:
    if x is None:
        return None
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def _one_step(model: Any, step: Step, x: Tensor, i: int) -> list[Tensor | None]:
    torch.manual_seed(7 + i)
    dshard.manual_seed(3 + i)
    model.zero_grad()
    out = step(model, x, i)
    return [_values(each) for each in (*out, *(p.grad for p in model.parameters()))]


def _differences(eager: list[Tensor | None], rehearsed: list[Tensor | None], tolerance: float) -> Iterator[str]:
    for n, (a, b) in enumerate(zip(eager, rehearsed, strict=True)):
        if a is None or b is None:
            if a is not b:
                yield f"value {n} is {'missing' if b is None else 'there'}"
        elif not (torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True) if tolerance else _same(a, b)):
            yield f"value {n} differs by {(a.float() - b.float()).abs().max():.1e}"


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(99.0), b.nan_to_num(99.0))


ROUNDING: dict[Any, float] = {
    "created_graph": 1e-6,
    "created_graph_of_attention": 1e-6,
    "twice_before_backward": 1e-6,
    **{("inner_and_outer", plan): 1e-6 for plan in ("fsdp", "fsdp in a block")},  # it creates a graph
}
"""Programs whose gradients may be rounded in another order, under some plan."""


class Around(nn.Module):
    """A model of one block, whose weights are gathered for it."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.blocks[0](*args, **kwargs)


class InBlock:
    """A module in a parallelized model of one block, which is called where the module is."""

    def __init__(self, block: nn.Module, mesh: Any, plan: str) -> None:
        vars(self).update(block=block, model=parallelize(Around(block), mesh, plan, torch.randn(ROWS, WIDTH)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model if name == "rehearsed" else self.block, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.block, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


def run_program(name: str, plan: str, shape: tuple[int, ...], names: tuple[str, ...], mixed: bool = False) -> Outcome:
    """Run a program by Python, and then rehearsed.

    With `mixed`, ranks with an even number run by Python then, too. Each runs alone: gradients that a backward pass
    does not have for the first time begin in other buckets, so the passes of two models would be rounded otherwise.
    """
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    results, why_not = list[list[list[Tensor | None]]](), list[str]()
    for on in (False, not mixed or _rank() % 2 == 1):
        make, step = PROGRAMS[name]()
        torch.manual_seed(0)
        if plan == "fsdp in a block":
            model: Any = InBlock(make(), mesh, "fsdp")
        else:
            model = parallelize(make(), mesh, plan, torch.randn(ROWS, WIDTH))
        results.append([])
        for i in range(STEPS):
            x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(i))
            with dshard.rehearsing(on):
                results[-1].append(_one_step(model, step, x, i))
            why_not.append(model.rehearsed.why_not)
    wrong = list[str]()
    rounding = ROUNDING.get((name, plan), ROUNDING.get(name, 0.0))
    for i, (eager, rehearsed) in enumerate(zip(*results, strict=True)):
        wrong += [f"step {i}: {each}" for each in _differences(eager, rehearsed, rounding)]
    seen = model.rehearsed
    return Outcome(wrong, seen.answered, seen.calls, repr(seen), why_not[STEPS:])
