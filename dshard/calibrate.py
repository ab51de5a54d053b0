"""A topology measured with the collectives that dshard runs: what programs use of `dshard.tools.calibrate`."""

from dshard.tools.calibrate import COLLECTIVES, SECONDS, SIZES, Fit, Progress, fit, measure, measure_world, typical

__all__ = ["COLLECTIVES", "SECONDS", "SIZES", "Fit", "Progress", "fit", "measure", "measure_world", "typical"]
