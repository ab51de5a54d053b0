"""Setups of a model on devices: the mesh of stages, data and tensor parallelism; recomputation and sharded state."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt, prod
from typing import Literal, TypeAlias, get_args

from dshard.caches import cached
from dshard.errors import MeshError, ShapeError, StrategyError
from dshard.layout import Layout, Shape
from dshard.mesh import Mesh
from dshard.placements import Placement, Replicate, Shard
from dshard.simulate.tensor_forms import Form, Placements
from dshard.simulate.transformer import Model
from dshard.validate import as_int, as_tuple, check_one_of, check_type

Sharded: TypeAlias = Literal["none", "optimizer", "all"]
"""State that is sharded over data parallelism: none, the optimiser's, or weights and gradients as well."""

STAGES, DATA = "pp", "dp"


@dataclass(frozen=True, slots=True)
class Setup:
    """One way to train a model: a form of tensor parallelism, within data parallelism, within pipeline stages.

    Ranks of one tensor-parallel group are neighbours, those of one stage lie together.

    Attributes:
        form: How each block is split.
        tensor: The sizes of the form's mesh axes.
        data: Replicas that take other sequences.
        stages: Pipeline stages, of `layers / stages` blocks each.
        microbatches: The number into which a batch is cut; their gradients are summed.
        sharded: The state that is sharded over the replicas.
        recompute: Whether each block keeps its input alone and runs again for its backward pass.
        ranks: Which rank has each place of the mesh, in order; 0, 1, 2, ... unless given.

    Raises:
        StrategyError: no form, a size or number below one, or no such way to share.
    """

    form: Form
    tensor: tuple[int, ...] = ()
    data: int = 1
    stages: int = 1
    microbatches: int = 1
    sharded: Sharded = "none"
    recompute: bool = False
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_type(self.form, Form, "form", "give one of form_of(name)", StrategyError)
        sizes = as_tuple(self.tensor, "tensor", "give the sizes of the form's mesh axes, such as (2, 4)", StrategyError)
        counts = tuple(as_int(size, "tensor: a size", StrategyError, least=1) for size in sizes)
        object.__setattr__(self, "tensor", counts)
        for name in ("data", "stages", "microbatches"):
            object.__setattr__(self, name, as_int(getattr(self, name), name, StrategyError, least=1))
        check_one_of(self.sharded, get_args(Sharded), "sharded", StrategyError)
        check_type(self.recompute, bool, "recompute", "give True or False", StrategyError)
        object.__setattr__(self, "ranks", tuple(self.ranks))
        if self.ranks and len(self.ranks) != self.devices:
            raise StrategyError(f"{len(self.ranks)} ranks for {self.devices} devices: give one for each, or none")

    @property
    def mesh(self) -> Mesh:
        """The mesh of all devices.

        >>> from dshard.simulate.tensor_forms import form_of
        >>> str(Setup(form_of("optimus"), (2, 2), data=3).mesh)
        'pp=1 dp=3 r=2 c=2'
        """
        return _mesh((self.stages, self.data, *self.tensor), (STAGES, DATA, *self.form.roles), self.ranks)

    @property
    def strategy(self) -> str:
        """The name of this setup's strategy in `dshard.parallelize`, on the mesh of one stage.

        >>> from dshard.simulate.tensor_forms import form_of
        >>> Setup(form_of("megatron"), (2,), data=2, sharded="all").strategy
        'fsdp x megatron'
        """
        replicas = "fsdp" if self.sharded == "all" else "data"
        return replicas if self.form.name == "data" else f"{replicas} x {self.form.name}"

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.stages * self.data * prod(self.tensor)

    def check(self, model: Model, batch: int) -> None:
        """Refuse a model or batch that does not fit this setup.

        Raises:
            StrategyError: sizes that are not the form's, or heads fewer than the ranks that share them.
            ShapeError: a batch or layers that do not divide into microbatches, replicas or stages.
        """
        check_type(model, Model, "model", "give a dshard.simulate.Model", ShapeError)
        as_int(batch, "batch", ShapeError, least=1)
        if len(self.tensor) != len(self.form.roles):
            raise StrategyError(
                f"{self.form.name!r} has {len(self.form.roles)} mesh axes ({', '.join(self.form.roles)}), "
                f"but {self.tensor} are given: give one size each"
            )
        if problem := self.problem(model, batch):
            raise ShapeError(problem)

    def problem(self, model: Model, batch: int) -> str:
        """Why the model or a batch of `batch` sequences does not fit this setup; empty if it does."""
        if model.layers % self.stages:
            return f"{model.layers} layers do not divide into {self.stages} stages"
        if batch % self.microbatches:
            return f"a batch of {batch} sequences does not divide into {self.microbatches} microbatches"
        tokens = self.chunks_of_sequence
        if model.sequence % tokens:
            return f"{model.sequence} tokens of a sequence do not divide among {tokens} ranks"
        columns, rows = self.chunks_of_heads, self._ways(self.form.inner, 1) // tokens
        ways = {"heads": columns * (tokens if self.form.by_heads else 1), "sequences": self.data * rows}
        if model.heads % ways["heads"] or (model.kv_heads or model.heads) % ways["heads"]:
            heads = f"{model.heads} heads" + (f" ({model.kv_heads} of keys)" if model.kv_heads else "")
            return f"{heads} do not divide among {ways['heads']} ranks"
        if model.width < columns:
            return f"a width of {model.width} is less than the {columns} ranks that share it"
        if batch // self.microbatches % ways["sequences"]:
            return f"{batch // self.microbatches} sequences at a time do not divide among {ways['sequences']} ranks"
        return ""

    @property
    def chunks_of_sequence(self) -> int:
        """The number of ranks that share each sequence."""
        return prod(size for size, of_sequence in zip(self.tensor, self.form.sequence, strict=True) if of_sequence)

    @property
    def chunks_of_heads(self) -> int:
        """The number of ranks that share the heads, but for those that share each sequence."""
        return self._ways(self.form.inner, 2)

    def attention(self, placement: Placement) -> Layout:
        """The layout of queries, keys and values; axes that split sequences have this placement, as minor ones."""
        layout = self.activation(self.form.inner)
        for axis, of_sequence in enumerate(self.form.sequence, start=2):
            if of_sequence:
                layout = layout.replace(axis, Replicate())
                layout = layout.split(placement.dim, [axis]) if isinstance(placement, Shard) else layout
        return layout

    def scores(self, model: Model, sequences: int) -> float:
        """The share of a rank in the scores of attention of all heads of `sequences` sequences."""
        pairs = zip(self.form.inner, self.form.sequence, strict=True)
        inner = tuple(Replicate() if of_sequence else placement for placement, of_sequence in pairs)
        own = self.activation(inner).local_numel(self.shape(sequences, model.heads))
        return own / (sequences * model.heads * self.chunks_of_sequence)

    def _ways(self, placements: Placements, dim: int) -> int:
        """The number of chunks into which these placements shard a dim."""
        chunks = 1
        for size, placement in zip(self.tensor, placements, strict=True):
            chunks *= size if placement == Shard(dim) else 1
        return chunks

    def activation(self, placements: Placements) -> Layout:
        """The layout of activations with these placements within a replica; replicas have tokens of their own."""
        return self._layout(Shard(1), placements)

    def weight(self, placements: Placements) -> Layout:
        """The layout of a weight `[stage, in, out]` with these placements within a replica."""
        return self._layout(Replicate(), placements)

    def stored(self, placements: Placements) -> Layout:
        """The layout of a weight as it is stored: replicas may shard its rows, after all other axes."""
        layout = self.weight(placements)
        return layout.replace(1, Shard(1)) if self.sharded == "all" else layout

    def vector(self, features: Placements) -> Layout:
        """The stored layout of a bias or a norm's parameter `[stage, features]`, of features with these placements.

        Replicas may shard it, after all other axes.
        """
        split = (
            Shard(1) if gathered or placement == Shard(2) else Replicate()
            for gathered, placement in zip(self.form.gathered, features, strict=True)
        )
        layout = self._layout(Replicate(), tuple(split))
        return layout.split(1, [1]) if self.sharded == "all" else layout

    def shared(self, placements: Placements) -> Layout:
        """The layout in which the optimiser's state of a weight is stored."""
        layout = self.weight(placements)
        return layout if self.sharded == "none" else layout.replace(1, Shard(1))

    def shape(self, rows: int, columns: int) -> Shape:
        """The shape of a matrix that each stage has one of. Stages are a dim, so that none can send another's part."""
        return (self.stages, rows, columns)

    def _layout(self, data: Placement, placements: Placements) -> Layout:
        return _layout_on(self.mesh, (Shard(0), data, *placements))

    def __str__(self) -> str:
        sizes = [f"{axis}={size}" for axis, size in zip(self.mesh.names, self.mesh.shape, strict=True) if size > 1]
        words = [self.form.name, " ".join(sizes)]
        words += [f"{self.microbatches} microbatches"] * (self.microbatches > 1)
        words += [f"{self.sharded} sharded"] * (self.sharded != "none") + ["recompute"] * self.recompute
        return ", ".join(word for word in words if word)


@cached("simulated setups", 4096)
def _layout_on(mesh: Mesh, placements: Placements) -> Layout:
    return Layout(mesh, placements)


@cached("simulated setups", 1024)
def _mesh(shape: tuple[int, ...], names: tuple[str, ...], ranks: tuple[int, ...]) -> Mesh:
    """A cached mesh: one of thousands of ranks takes a while to make."""
    return Mesh(shape, names, ranks)


def host_tiles(rows: int, columns: int, per_host: int) -> tuple[int, ...]:
    """The ranks of a mesh (rows, columns) in which each host has a block, as square as the sizes allow.

    With rows of hosts instead, the columns of the mesh would cross as many hosts as there are rows; in blocks, both
    directions cross few (Optimus figure 8).

    >>> host_tiles(4, 4, 4)
    (0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15)
    """
    for name, number in ("rows", rows), ("columns", columns), ("per_host", per_host):
        as_int(number, name, MeshError, least=1)
    high = next((h for h in range(isqrt(per_host), 0, -1) if _tiles(rows, columns, h, per_host)), None)
    if high is None:
        raise MeshError(
            f"hosts of {per_host} ranks do not tile a mesh of ({rows}, {columns}): no block of that size does"
        )
    wide = per_host // high

    def rank(row: int, column: int) -> int:
        host = (row // high) * (columns // wide) + column // wide
        return host * per_host + (row % high) * wide + column % wide

    return tuple(rank(row, column) for row in range(rows) for column in range(columns))


def _tiles(rows: int, columns: int, high: int, per_host: int) -> bool:
    return per_host % high == 0 and rows % high == 0 and columns % (per_host // high) == 0
