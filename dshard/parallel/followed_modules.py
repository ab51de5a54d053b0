"""Where the planned calls of a model's modules begin: each module that runs goes on at its own."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial

from torch.utils.checkpoint import checkpoint

from dshard.dispatch.planned_calls import PLANNED, PlannedCall, PlannedCalls
from dshard.parallel.plan_values import Plan
from dshard.rehearsal.region_recording import RegionRecording
from dshard.rehearsal.session import HERE
from dshard.torch_private import saved_tensor_hooks


class FollowedModules:
    """The planned calls of a model, and for each module with modules in it the numbers at which its visits begin.

    Visits of a module with unlike layouts are laid out by cost: a visit that is recomputed is not known by its number.
    """

    def __init__(self, plan: Plan) -> None:
        self.mesh = plan.mesh
        self.begins, ends = _visits(plan.calls)
        self.planned = PlannedCalls(_alike(plan.calls, self.begins, ends))

    def enter(self) -> Callable[[], None]:
        """Begin a forward pass of the model, and return the function that ends it."""
        before = PLANNED.position()
        PLANNED.put(self.planned, 0)
        PLANNED.visits = Counter()
        return partial(PLANNED.put, *before)

    def arrive(self, name: str, again: bool = False) -> None:
        """The module of this name begins to run: its calls are the next ones, unless there were later ones.

        If it runs `again`, in a backward pass, those before it need not be made.
        """
        begins, visit = self.begins.get(name), PLANNED.visits[name]
        if begins is None:
            return
        PLANNED.visits[name] += 1
        hooks = saved_tensor_hooks(True)
        if hooks is not None and getattr(hooks[0], "__module__", None) == checkpoint.__module__:
            PLANNED.inside(hooks[0], name)
        at = begins[min(visit, len(begins) - 1)]
        if at <= PLANNED.at:
            return
        counts = HERE.answer is None or isinstance(HERE.answer, RegionRecording)  # not calls that are answered
        if counts and not again:
            left_out = [each for each in self.planned.calls[PLANNED.at : at] if each.is_laid_out]
            if left_out:
                self.planned.warn(left_out[0], f"went on to {name} without", self.mesh)
        PLANNED.put(self.planned, at)


def _visits(calls: Sequence[PlannedCall]) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """For each module the numbers of the first call of each visit to it, and of the last."""
    begins, ends = defaultdict[str, list[int]](list), defaultdict[str, list[int]](list)
    for n, call in enumerate(calls):
        for module in call.begun:
            if module:
                begins[module].append(n)
                ends[module].append(n)
        names = call.module.split(".")
        for module in [".".join(names[: i + 1]) for i in range(len(names))]:
            ends[module][-1:] = [n] if ends[module] else []
    return begins, ends


def _alike(calls: Sequence[PlannedCall], begins: dict[str, list[int]], ends: dict[str, list[int]]) -> list[PlannedCall]:
    """The calls, with those by cost of modules whose visits are not alike."""
    out = [*calls]
    for module, firsts in begins.items():
        visits = [calls[first : last + 1] for first, last in zip(firsts, ends[module], strict=True)]
        if len({tuple([call.layouts() for call in visit]) for visit in visits}) > 1:
            for first, last in zip(firsts, ends[module], strict=True):
                out[first : last + 1] = [call.by_cost() for call in out[first : last + 1]]
    return out
