"""Random numbers that a forward pass draws: rehearsed and replayed calls draw what calls by Python draw."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import dshard
from dshard.testing import RankPool

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "like a view with gaps": torch.randn_like,
    "without replacement": lambda x: torch.multinomial(x.softmax(-1), 4).to(x.dtype),
    "with replacement": lambda x: torch.multinomial(x.softmax(-1), 1, True).to(x.dtype),
    "by torch's generator": lambda x: torch.poisson(x.detach().exp()),
    "by a sampler with a gradient": lambda x: torch._standard_gamma(x.exp()),
    "of a size": lambda x: x.exp().new(x.shape).exponential_(),
    "until a condition holds": lambda x: until_none_is_small(x),
}
REPLAYED = ("with replacement", "by a sampler with a gradient")


def until_none_is_small(x: Tensor) -> Tensor:
    """Noise whose elements are drawn again until each is above a half."""
    out = torch.zeros_like(x)
    while not (out > 0.5).all():
        out = torch.where(out > 0.5, out, torch.rand_like(x))
    return out.detach()


class Sampling(nn.Module):
    """A mean and a scale from one product, and a sample of both."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.product, self.draw = nn.Linear(6, 8, dtype=torch.float64), draw

    def forward(self, x: Tensor) -> Tensor:
        mean, scale = self.product(x).chunk(2, -1)
        return ((mean + self.draw(mean) * scale) ** 2).sum()


def losses_of(name: str, way: str, grad: bool) -> tuple[list[float], list[Tensor]]:
    """The losses of four calls, and the gradients."""
    torch.manual_seed(0)
    net, x = Sampling(DRAWS[name]), torch.randn(7, 6, dtype=torch.float64)
    dshard.parallelize(net, dshard.init_device_mesh("cpu", (4,)), "data", x)
    dshard.manual_seed(1)

    def step(x: Tensor) -> Tensor:
        loss = net(x)
        if grad:
            loss.backward()
        return loss.detach()  # type: ignore[no-any-return]

    run = dshard.replay(step) if way == "replay" else step
    with dshard.rehearsing(way == "rehearse"), torch.set_grad_enabled(grad):
        losses = [float(run(x)) for _ in range(4)]
    return losses, [p.grad.full_tensor() for p in net.parameters() if p.grad is not None]  # type: ignore[attr-defined]


def differences() -> list[object]:
    """The draws, ways and calls that give other losses or gradients than Python, or the same loss twice."""
    found = list[object]()
    for name in DRAWS:
        for grad in (True, False) if name in REPLAYED else (True,):
            losses, grads = losses_of(name, "python", grad)
            for way in ("rehearse", "replay")[: 2 if name in REPLAYED else 1]:
                of_way, grads_of_way = losses_of(name, way, grad)
                same = all(torch.equal(a, b) for a, b in zip(grads, grads_of_way, strict=True))
                if losses != of_way or len({*losses}) < len(losses) or not same:
                    found.append((name, way, grad, losses, of_way))
    return found


def test_a_rehearsed_call_draws_what_python_draws(ranks: RankPool) -> None:
    assert ranks.run(differences) == [[]] * 4


def sample_of_nan() -> str:
    """The error of weights that are not numbers, in a call that is answered."""
    net, x = Sampling(DRAWS["without replacement"]), torch.randn(8, 6, dtype=torch.float64)
    dshard.parallelize(net, dshard.init_device_mesh("cpu", (4,)), "data", x)
    with torch.no_grad():
        for _ in range(4):
            net(x)
        try:
            net(x * float("nan"))
        except RuntimeError as error:
            return str(error)
    return ""


def test_weights_are_checked_in_each_call(ranks: RankPool) -> None:
    assert all("probability tensor contains" in each for each in ranks.run(sample_of_nan))


def permutations(replays: bool) -> list[list[int]]:
    """Six permutations, each of a call."""
    mesh = dshard.init_device_mesh("cpu", (4,))
    step = dshard.replay(lambda: dshard.randperm(8, device_mesh=mesh))
    dshard.manual_seed(2)
    found = [(step if replays else step.__wrapped__)().tolist() for _ in range(6)]  # type: ignore[attr-defined]
    assert step.replays == (3 if replays else 0), step.why_not
    return found


def test_a_replay_draws_another_permutation_each_time(ranks: RankPool) -> None:
    assert ranks.run(permutations, True) == ranks.run(permutations, False)
