"""One forward and backward pass, with copies of what each module was given, returned, and holds at its end."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dshard.core.transforms import is_wrapped
from dshard.parallel.nested_tensors import map_tensors, named_tensors
from dshard.torch_dtensor import TorchDTensor
from dshard.torch_private import graph_task_id

BEFORE, INPUT, OUTPUT, AFTER = "value before", "input", "output", "value after"
OF_INPUT, OF_OUTPUT, OF_PARAMETER = "gradient of input", "gradient of output", "gradient of parameter"
GRADIENTS = frozenset({OF_INPUT, OF_OUTPUT, OF_PARAMETER})


class Call(NamedTuple):
    """One call of a module, by its path and how often it was called before."""

    module: str
    number: int


class Place(NamedTuple):
    """Where a tensor stands in a pass: a call, what the tensor is to it, and its name there."""

    call: Call
    what: str
    name: str


class Rounding:
    """Changes floating-point tensors at random by as much as a rounding of their dtype does."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, x: Tensor) -> Tensor:
        """A tensor whose elements each differ from those of `x` by at most half the dtype's epsilon."""
        if not x.is_floating_point():
            return x
        with torch.no_grad():  # so that nothing is saved, which a checkpoint would miss when it computes once more
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            factor = torch.rand(x.shape, generator=self.generator, device=x.device, dtype=wide.dtype)
            change = (wide * (torch.finfo(x.dtype).eps * (factor - 0.5))).to(x.dtype)
        return x + change


class ObservedPass:
    """What the modules of a model do in a pass: their `calls` as they began, those that `ended`, and all `values`.

    With `rounding` what modules return, and its gradients, are changed by it. If `isolated`, each call has its inputs
    for itself, so that their gradients are those of this call alone.
    """

    def __init__(self, rounding: Rounding | None = None, *, isolated: bool = False) -> None:
        self.calls: list[Call] = []
        self.ended: list[Call] = []
        self.values: dict[Place, Tensor] = {}
        self.local: set[Place] = set()
        self.overwritten: set[Place] = set()
        self.kinds: dict[str, str] = {}
        self._counts: Counter[str] = Counter()
        self._running: list[Call] = []
        self._hooked: list[tuple[Place, Tensor, int]] = []
        self._rounding, self._isolated = rounding, isolated

    def watch(self, path: str, module: nn.Module) -> None:
        """Observe a module, after the hooks that it has."""
        self.kinds[path] = type(module).__name__
        module.register_forward_pre_hook(partial(self._enter, path), with_kwargs=True)
        module.register_forward_hook(self._leave)

    def keep_state(self, model: nn.Module, what: str) -> None:
        """Keep the values of all parameters and buffers, or the gradients of all parameters."""
        kept: set[int] = set()
        for path, module in model.named_modules():
            buffers = {} if what == OF_PARAMETER else module._buffers
            for name, x in (*module._parameters.items(), *buffers.items()):
                if x is None or id(x) in kept:
                    continue
                kept.add(id(x))
                value = x.grad if what == OF_PARAMETER else x
                if value is not None:
                    self._keep(Place(Call(path, 0), what, name), value)

    def gather(self) -> None:
        """Make the values whole on all ranks; `local` are those that are not distributed."""
        # torch calls no hook of a view that is overwritten afterwards
        self.overwritten = {at for at, x, version in self._hooked if at not in self.values and x._version != version}
        self._hooked.clear()
        self.local = {at for at, x in self.values.items() if not isinstance(x, TorchDTensor)}
        with torch.no_grad():
            self.values = {at: x.full_tensor() if isinstance(x, TorchDTensor) else x for at, x in self.values.items()}

    def _enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if graph_task_id() != -1:  # a checkpoint computes it once more
            return None
        call = Call(path, self._counts[path])
        self._counts[path] += 1
        self.calls.append(call)
        self._running.append(call)
        if self._isolated:
            own: dict[int, Tensor] = {}
            args, kwargs = map_tensors((args, kwargs), lambda x: own.setdefault(id(x), _alias(x)))
        self._keep_all(call, INPUT, OF_INPUT, {**{str(i): x for i, x in enumerate(args)}, **kwargs})
        return (args, kwargs) if self._isolated else None

    def _leave(self, module: nn.Module, args: object, out: Any) -> Any:
        if graph_task_id() != -1:
            return None
        self.ended.append(self._running.pop())
        if self._rounding is not None:
            out = map_tensors(out, self._rounding)
        self._keep_all(self.ended[-1], OUTPUT, OF_OUTPUT, out)
        return out

    def _keep_all(self, call: Call, what: str, gradient: str, tree: object) -> None:
        for path, x in named_tensors(tree):
            if is_wrapped(x) or not (isinstance(x, TorchDTensor) or x.layout is torch.strided):
                continue
            name = ".".join(path)
            self._keep(Place(call, what, name), x)
            if x.requires_grad and torch.is_grad_enabled():
                at = Place(call, gradient, name)
                self._hooked.append((at, x.detach(), x._version))
                x.register_hook(partial(self._keep_gradient, at))

    def _keep_gradient(self, at: Place, gradient: Tensor) -> Tensor | None:
        self._keep(at, gradient)
        return None if self._rounding is None else self._rounding(gradient)

    def _keep(self, at: Place, x: Tensor) -> None:
        with torch.no_grad():
            self.values[at] = x.detach().clone()


def _alias(x: Tensor) -> Tensor:
    return x.view_as(x) if x.requires_grad and torch.is_grad_enabled() else x
