"""The sizes of a transformer, for a simulation, and the operations and parameters of one block."""

from __future__ import annotations

from dataclasses import dataclass

from dshard.errors import ShapeError
from dshard.validate import as_int


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer of a block: `features_in` x `features_out`, and how many of them lie side by side."""

    name: str
    features_in: int
    features_out: int

    @property
    def parameters(self) -> int:
        """The number of elements of the weight."""
        return self.features_in * self.features_out


@dataclass(frozen=True, slots=True)
class Model:
    """A transformer: blocks of attention and feed-forward, between an embedding and a head.

    >>> model = Model(layers=2, hidden=8, heads=2, sequence=4, vocabulary=10)
    >>> [f"{x.name} {x.features_in}x{x.features_out}" for x in model.linears]
    ['qkv 8x24', 'out 8x8', 'up 8x32', 'down 32x8']
    >>> model.parameters == 2 * 12 * 8**2 + 10 * 8
    True

    Attributes:
        layers: Blocks.
        hidden: The hidden size.
        heads: Attention heads.
        sequence: Tokens of one sequence.
        vocabulary: Tokens known; 0 leaves embedding and head out.
        kv_heads: Heads of keys and values, `heads` unless given.
        ffn: The width of the feed-forward part, four times `hidden` unless given.
        gated: Whether it has a second first layer, whose result gates the other.
        head_size: The size of one head, `hidden / heads` unless given.
        tied: Whether the head is the embedding.
        fused: Whether attention keeps no scores for its backward pass.
        biases: Whether linear layers and norms have them; unless given, where it is not gated.
        vectors: Parameters that are no matrices of blocks, embedding or head, where a configuration says how many.

    Raises:
        ShapeError: a size below one, or heads that do not divide.
    """

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int = 0
    kv_heads: int | None = None
    ffn: int | None = None
    gated: bool = False
    head_size: int | None = None
    tied: bool = True
    fused: bool = True
    biases: bool | None = None
    vectors: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "sequence", "vocabulary", "kv_heads", "ffn", "head_size"):
            size = getattr(self, name)
            if size is None and name in ("kv_heads", "ffn", "head_size"):
                continue
            least = 0 if name == "vocabulary" else 1
            number = as_int(size, f"the model's {name}", ShapeError)
            if number < least:
                raise ShapeError(f"a model of {size} {name}: all sizes must be above zero")
            object.__setattr__(self, name, number)
        if self.head_size is None and self.hidden % self.heads:
            raise ShapeError(f"{self.heads} heads do not divide the hidden size {self.hidden}: give head_size")
        if self.heads % (self.kv_heads or self.heads):
            raise ShapeError(f"{self.kv_heads} heads of keys and values do not divide the {self.heads} heads")

    @property
    def head(self) -> int:
        """The size of one head."""
        return self.head_size or self.hidden // self.heads

    @property
    def query(self) -> int:
        """The features of all queries."""
        return self.heads * self.head

    @property
    def qkv(self) -> int:
        """The features of queries, keys and values together."""
        return self.query + 2 * (self.kv_heads or self.heads) * self.head

    @property
    def width(self) -> int:
        """The width of the feed-forward part."""
        return self.ffn or 4 * self.hidden

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The linear layers of one block in order: two pairs."""
        return (
            Linear("qkv", self.hidden, self.qkv),
            Linear("out", self.query, self.hidden),
            Linear("up", self.hidden, self.width * (2 if self.gated else 1)),
            Linear("down", self.width, self.hidden),
        )

    @property
    def biased(self) -> bool:
        """Whether linear layers and norms have biases."""
        return not self.gated if self.biases is None else self.biases

    @property
    def block_parameters(self) -> int:
        """The number of elements of the weights of one block."""
        return sum(linear.parameters for linear in self.linears)

    @property
    def parameters(self) -> int:
        """The number of elements of all weights; biases, norms and positions are those of `vectors`."""
        tables = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * self.block_parameters + tables + self.vectors

    def core_flops(self, sequences: float) -> float:
        """Operations of attention on `sequences` sequences, forward: scores and their products with the values."""
        return 4.0 * sequences * self.sequence**2 * self.query
