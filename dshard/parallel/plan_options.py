"""Options of a plan: dtypes, and the modules whose weights are gathered together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from torch import nn

from dshard.errors import ArgumentError, LayoutError
from dshard.parallel.plan_values import Plan
from dshard.parallel.precision import Precision, as_precision
from dshard.validate import article, as_tuple, shown


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The options given to `parallelize` or `plan_model`; None keeps a plan's own."""

    precision: Precision | None
    groups: tuple[str, ...] | None

    def of(self, plan: Plan) -> Plan:
        """`plan` with these options."""
        precision = plan.precision if self.precision is None else self.precision
        return replace(plan, precision=precision, groups=plan.groups if self.groups is None else self.groups)


def plan_options(model: nn.Module, precision: object, group: object) -> PlanOptions:
    """The options of the arguments `precision` and `group`."""
    if group is None:
        return PlanOptions(as_precision(precision), None)
    modules = {path: m for path, m in model.named_modules() if path and next(m.parameters(), None) is not None}
    way_out = 'give patterns of their paths, such as ["layers.*"], or the modules themselves'
    selectors = as_tuple(group, "group", way_out)
    paths = dict.fromkeys(path for each in selectors for path in _matches(each, modules, type(model).__name__, way_out))
    return PlanOptions(as_precision(precision), tuple(path for path in modules if path in paths))


def _matches(selector: object, modules: dict[str, nn.Module], model: str, way_out: str) -> list[str]:
    if isinstance(selector, str):
        paths = [path for path in modules if _is_like(path.split("."), selector.split("."))]
    elif isinstance(selector, nn.Module):
        paths = [path for path, module in modules.items() if module is selector]
    else:
        raise ArgumentError(f"group: {shown(selector)} is {article(selector)}: {way_out}")
    if not paths:
        name = repr(selector) if isinstance(selector, str) else article(selector)
        raise LayoutError(
            f"group: {name} is no module of {model} with parameters: {way_out}; there are {', '.join([*modules][:3])}"
        )
    return paths


def _is_like(names: list[str], patterns: list[str]) -> bool:
    """Whether each name of a path matches its pattern: "layers.*" are the layers, not their submodules."""
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))
