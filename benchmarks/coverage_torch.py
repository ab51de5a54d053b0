"""The calls of `coverage.py` on torch's own DTensor, on four gloo ranks: same samples, layouts, terms, comparisons.

    python benchmarks/coverage_torch.py --state FILE [--ops PATTERN] [--samples 6] [--draws 3] [--limit 20]

Ranks are processes with a time limit for each call, because some calls never return; these are counted, and the ranks
started again. A call that raises on some rank is an error. In-place forms and refused arguments are left out.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from functools import cache, lru_cache
from typing import Any

import torch.distributed as dist
import torch.distributed.tensor as theirs
from operator_cases import Trial, compare, gradients, name_of, operators, trials
from operator_counts import Kept, kept_in
from torch import Tensor

from dshard import DeviceMesh, Layout, Mesh, Partial, Shard, init_device_mesh
from dshard.errors import RankError
from dshard.testing import RankPool
from dshard.testing.simulated_ranks import local_tensor_of

START_LIMIT = 120.0


@cache
def mesh_like(mesh: Mesh) -> DeviceMesh:
    return init_device_mesh("cpu", mesh.shape)


def their_placement(placement: Any) -> Any:
    match placement:
        case Shard(dim):
            return theirs.Shard(dim)
        case Partial(op):
            return theirs.Partial(op)
        case _:
            return theirs.Replicate()


def laid(x: Tensor, layout: Layout, seed: int) -> Tensor:
    """The tensor as torch's DTensor, this rank's part made here."""
    mesh = mesh_like(layout.mesh)
    local = local_tensor_of(x, layout, seed)(layout.mesh.coordinate(dist.get_rank()))
    placements = [their_placement(p) for p in layout.placements]
    return theirs.DTensor.from_local(local, mesh, placements, run_check=False, shape=x.shape, stride=x.stride())


def whole_weight(weight: Tensor, out: Any) -> Tensor:
    """The weight of an output, whole on all ranks."""
    if not isinstance(out, theirs.DTensor):
        return weight
    mesh = out.device_mesh
    return theirs.DTensor.from_local(weight, mesh, [theirs.Replicate()] * mesh.ndim, run_check=False)


def gathered(values: list[Any]) -> list[Any]:
    return [value.detach().full_tensor() if isinstance(value, theirs.DTensor) else value for value in values]


@lru_cache(maxsize=1)
def trials_of(name: str, samples: int, draws: int, seed: int) -> list[Trial]:
    (op,) = (op for op in operators("") if name_of(op) == name)
    return [trial for trial in trials(op, samples, draws, seed) if not trial.in_place]


# -- on ranks


def prepare(*request: Any) -> list[tuple[int, bool]]:
    """Make the trials of an operator: of each the axes of its mesh, and whether it has gradients."""
    warnings.filterwarnings("ignore")
    return [(trial.mesh.ndim, bool(trial.expected.gradients)) for trial in trials_of(*request)]


def forward(i: int, *request: Any) -> tuple[str, Any]:
    """Trial number `i`, values only."""
    trial = trials_of(*request)[i]
    outputs = trial.case.called(operands(trial))
    return judged(trial.expected.outputs, outputs, "output", trial, request[0])


def backward(i: int, *request: Any) -> tuple[str, Any]:
    """Trial number `i` with gradients."""
    trial = trials_of(*request)[i]
    tensors = operands(trial)
    found, _ = gradients(trial.case.called(tensors), tensors, trial.wanted, trial.expected.weights, whole_weight)
    return judged(list(trial.expected.gradients), found, "gradient", trial, request[0])


def operands(trial: Trial) -> list[Tensor]:
    pairs = enumerate(zip(trial.case.tensors(), trial.layouts, strict=True))
    tensors = [laid(x, layout, n) for n, (x, layout) in pairs]
    return [x.requires_grad_(w) if w else x for x, w in zip(tensors, trial.wanted, strict=True)]


def judged(expected: list[Any], found: list[Any], what: str, trial: Trial, name: str) -> tuple[str, Any]:
    if what == "gradient" and trial.random:
        return "right", ""
    try:
        values = found if "empty" in name else gathered(found)
        compare(expected, values, what, trial.random)
    except AssertionError as error:
        return "wrong", f"{trial}: {' '.join(str(error).split())[:300]}"
    return "right", ""


# -- from here


def check_op(pool: RankPool, name: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """What was seen of one operator, None if ranks did not start; after a call that does not return none is tried."""
    request = (name, options.samples, options.draws, options.seed)
    seen: list[tuple[int, str, str]] = []
    notes: list[str] = []
    start = time.perf_counter()
    try:
        kinds = pool.run(prepare, *request, timeout=START_LIMIT)[0]
    except RankError as error:
        print(f"{name}: ranks did not start: {str(error)[:200]}", file=sys.stderr, flush=True)
        return None
    for i, (axes, has_gradients) in enumerate(kinds):
        first = call(pool, forward, i, request, notes, options.limit)
        second = "" if not has_gradients else first
        if has_gradients and first == "right":
            second = call(pool, backward, i, request, notes, options.limit)
        seen.append((axes, first, second))
        if "hang" in (first, second):
            break
    return {"op": name, "seen": seen, "notes": notes[:8], "seconds": time.perf_counter() - start}


def call(pool: RankPool, function: Any, i: int, request: tuple[Any, ...], notes: list[str], limit: float) -> str:
    try:
        if not pool._workers:
            pool.run(prepare, *request, timeout=START_LIMIT)
        found = pool.run(function, i, *request, timeout=limit)
    except RankError as error:
        text = str(error)
        told = text.split("\n---")[0].splitlines()
        notes.append(f"{function.__name__} {i}: {told[0][:200]} ... {text.strip().splitlines()[-1][:300]}")
        return "hang" if any(say in "\n".join(told) for say in ("had not answered", "exited with")) else "error"
    notes += [f"{function.__name__} {i}: {note}" for verdict, note in found if verdict == "wrong"][:1]
    return "wrong" if any(verdict == "wrong" for verdict, _ in found) else "right"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default="", help="a regular expression: only operators whose names it matches")
    parser.add_argument("--samples", type=int, default=6, help="samples of each operator")
    parser.add_argument("--draws", type=int, default=3, help="layouts of each sample")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=20.0, help="seconds for one call")
    parser.add_argument("--state", required=True, help="keep results here, and go on from them")
    options = parser.parse_args()
    kept = Kept(options.state, dict(kept_in(options.state)))
    os.environ["PYTHONHASHSEED"] = "0"  # some of torch's samples come out of sets, and all ranks want the same
    with RankPool(4) as pool:
        for op in operators(options.ops):
            name = name_of(op)
            if name in kept.rows:
                continue
            row = check_op(pool, name, options)
            if row is not None:  # else the next run asks again
                kept.write(row)
                print(f"{name:60} {row['seconds']:6.1f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
