"""The samplers under the path that scripts use; see `dpjax.learning.samplers`."""

from dpjax.learning.samplers import Clients, Cyclic, Full, Poisson, Random

__all__ = ["Clients", "Cyclic", "Full", "Poisson", "Random"]
