"""Random values that do not depend on the mesh: each is a function of seed, draw and global index alone.

Design: docs/design/0004-randomness.md
"""

from dshard.ops.random.distributions import Distribution
from dshard.ops.random.operators import (
    RANDOM,
    draw_for,
    filled,
    integers,
    is_random,
    kept_factor,
    native_dropout,
    permutation,
    seeded_alike,
    seeded_op,
    standard_normal,
    uniform,
)
from dshard.ops.random.state import Draw, get_rng_state, manual_seed, set_rng_state
