"""The samplers under the path that scripts use; see `dpjax.learning.samplers`."""

from dpjax.accounting.balls_in_bins import BallsInBins
from dpjax.learning.samplers import Clients, Cyclic, Full, Poisson, Random

__all__ = ["BallsInBins", "Clients", "Cyclic", "Full", "Poisson", "Random"]
