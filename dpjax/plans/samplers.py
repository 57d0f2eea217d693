"""The samplers under the path that scripts use; see `dpjax.learning.samplers`."""

from dpjax.learning.samplers import BallsInBins, Clients, Cyclic, Full, Poisson, Random

__all__ = ["BallsInBins", "Clients", "Cyclic", "Full", "Poisson", "Random"]
