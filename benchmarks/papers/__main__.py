"""Writes the tables of docs/papers.md: published figures beside those that dshard predicts.

    python -m benchmarks.papers

From the repository's root; about two minutes on two cores.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import get_args

from benchmarks.papers import memory
from benchmarks.papers.atp import Transformer, rank_meshes
from benchmarks.papers.layers import layers
from benchmarks.papers.scaling import (
    TABLES,
    TRANSPORTS,
    Machine,
    Row,
    Transport,
    fit,
    misfit,
    misordered,
    most_with_ties,
    read,
    spearman,
    step_seconds,
    unflagged,
)
from benchmarks.section import markdown_table, write_section
from dshard.topology import Topology

PAGE = Path(__file__).parent.parent.parent / "docs" / "papers.md"
PAPERS = {"optimus": ("optimus_2", "optimus_3"), "tesseract": ("tesseract_1", "tesseract_2")}
Job = tuple[tuple[str, ...], Transport]
WAYS: tuple[Transport, ...] = get_args(Transport)
NCCL: Transport = "pipelined"


def fitted(job: Job) -> Machine:
    """The machine of these tables together."""
    tables, transport = job
    return fit([row for table in tables for row in unflagged(table)], transport)


def correlation(table: str, machine: Machine, transport: Transport) -> float:
    """Of the unflagged rows of a table."""
    rows = unflagged(table)
    return spearman([step_seconds(row, machine, transport) for row in rows], [row.seconds for row in rows])


def correlations(machines: dict[Job, Machine]) -> str:
    """A row for each table, a column for each transport, and for one machine of both tables of a paper."""
    body = []
    for table, title in TABLES.items():
        both = machines[next(tables for tables in PAPERS.values() if table in tables), NCCL]
        cells = []
        for transport in WAYS:
            alone = machines[(table,), transport]
            rms = misfit(alone, unflagged(table), transport) ** 0.5
            cells.append(f"{correlation(table, alone, transport):.2f}, {rms:.0%}")
        cells.append(f"{correlation(table, both, NCCL):.2f}, {misfit(both, unflagged(table), NCCL) ** 0.5:.0%}")
        body.append([title, str(len(unflagged(table))), *cells, f"{most_with_ties(unflagged(table)):.2f}"])
    return markdown_table(["table", "rows", *WAYS, "one machine", "at most"], body)


def named(row: Row) -> str:
    """A row, in few words."""
    return f"{row.system} {'x'.join(map(str, row.shape))}"


def rows_of(table: str, machines: dict[Job, Machine], transport: Transport) -> str:
    """Published beside predicted, flagged rows last."""
    machine = machines[(table,), transport]
    body = []
    for row in sorted(read(table), key=lambda row: bool(row.flag)):
        mine = step_seconds(row, machine, transport)
        error = f"{mine / row.seconds - 1:+.0%}"
        body.append([named(row), f"{row.batch}", f"{row.hidden}", f"{row.seconds:.4f}", f"{mine:.4f}", error, row.flag])
    rows = unflagged(table)
    wrong = misordered(rows, [step_seconds(row, machine, transport) for row in rows])
    pairs = "; ".join(f"{named(a)} before {named(b)} by {b.seconds / a.seconds - 1:.0%}" for a, b in wrong)
    rates = f"{machine.flops / 1e12:.1f} Tflop/s, {machine.inside / 1e9:.1f} GB/s within a node, "
    return "\n".join(
        [
            f"**{TABLES[table]}.** Fitted: {rates}{machine.between / 1e9:.1f} GB/s of a node.",
            "",
            markdown_table(["row", "batch", "hidden", "published s", "predicted s", "error", "left out because"], body),
            "",
            f"Published in the other order: {pairs or 'none'}.",
        ]
    )


def crossovers(machines: dict[Job, Machine]) -> str:
    """Optimus over Megatron in seconds per sequence, by the number of GPUs: below 1 Optimus is ahead."""
    body = []
    for table in PAPERS["optimus"]:
        pairs = {row.gpus: {} for row in read(table)}  # type: dict[int, dict[str, Row]]
        for row in read(table):
            pairs[row.gpus][row.system] = row
        for gpus, pair in pairs.items():
            cells = [f"{pair['optimus'].seconds / pair['megatron'].seconds:.2f}"]
            for way in WAYS:
                times = {name: step_seconds(row, machines[(table,), way], way) for name, row in pair.items()}
                cells.append(f"{times['optimus'] / times['megatron']:.2f}")
            flagged = "; ".join(f"{name}: {row.flag}" for name, row in pair.items() if row.flag)
            body.append([TABLES[table].split(":")[0], str(gpus), *cells, flagged])
    return markdown_table(["table", "GPUs", "published", *WAYS, "inconsistent"], body)


def atp() -> str:
    """Figure 12: for each number of devices what each mesh costs, in units of 2 L b s h / bandwidth."""
    body = []
    for devices in (2**i for i in range(2, 10)):
        transformer = Transformer(8 * devices, devices)
        unit = 2 * transformer.tokens * transformer.hidden * transformer.itemsize / 25e9
        choices = rank_meshes(devices, Topology.flat(25e9, ranks=devices).bytes_only(), transformer)
        costs = {choice.name: f"{choice.seconds / unit:.3f}" for choice in choices}
        body.append([str(devices), choices[0].name, *(costs.get(f"ATP-{2**i}", "") for i in range(6))])
    return markdown_table(["devices", "best", *(f"ATP-{2**i}" for i in range(6))], body)


def atp_layers() -> str:
    """Table 2 of ATP."""
    body = [
        [
            row.model,
            f"{row.hidden}",
            *(f"{value:g}" for value in (row.published[0], round(row.counted[0], 6))),
            f"{row.errors[0]:+.1%}",
            *(f"{value:g}" for value in (row.published[1], round(row.counted[1], 6))),
            f"{row.errors[1]:+.1%}",
        ]
        for row in layers()
    ]
    head = ["model", "hidden", "parameters", "counted", "error", "operations", "counted", "error"]
    return markdown_table(head, body)


def fitting() -> str:
    """What fits on 64 GPUs."""
    published = {"largest batch": "480 / 60", "ViT-Large, batch": "5.3", "ViT, parameters": "9.55"}
    found = [memory.optimus_batches(), memory.blog_batches(), memory.blog_parameters()]
    sources = ["Optimus, figure 9", "blog", "blog"]
    body = [
        [
            source,
            what,
            said,
            f"{most['megatron']:,}",
            f"{most['optimus']:,}",
            f"{most['optimus'] / most['megatron']:.1f}",
        ]
        for source, (what, said), most in zip(sources, published.items(), found, strict=True)
    ]
    return markdown_table(["source", "what", "published", "Megatron", "Optimus", "ratio"], body)


def main() -> None:
    """Fit, and write."""
    jobs: list[Job] = [(tables, NCCL) for tables in PAPERS.values()]
    jobs += [((table,), transport) for table in TABLES for transport in WAYS]
    with ProcessPoolExecutor(4) as pool:
        machines = dict(zip(jobs, pool.map(fitted, jobs), strict=True))
    write_section("correlations", correlations(machines), PAGE)
    write_section("transports", "\n".join(f"- *{name}*: {what}." for name, what in TRANSPORTS.items()), PAGE)
    write_section("rows", "\n\n".join(rows_of(table, machines, NCCL) for table in TABLES), PAGE)
    write_section("crossovers", crossovers(machines), PAGE)
    write_section("atp", atp(), PAGE)
    write_section("atp-layers", atp_layers(), PAGE)
    write_section("memory", fitting(), PAGE)


if __name__ == "__main__":
    main()
