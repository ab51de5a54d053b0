"""A topology measured with the collectives that dshard runs: latency and bandwidth of each, along each mesh axis.

`rounds` times collectives and local work on all ranks at once, `fit` turns times into figures, `measure` does both and
makes the topology, the same on every rank.
"""

from dshard.tools.calibrate.measure import SECONDS, measure, measure_world
from dshard.tools.calibrate.rounds import COLLECTIVES, SIZES, Fit, Progress, fit, typical
