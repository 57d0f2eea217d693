"""Both streams of noise by their names, and distances of what they draw from what it should be."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats

from dpjax.transforms import variates

ROWS = 64
COLUMNS = 20_001


def key(seed=3):
    return jax.random.key(seed, impl="threefry2x32")


@dataclass(frozen=True)
class Stream:
    """A sampler, SciPy's name of its law, and how far compiled code may round it otherwise."""

    draw: Callable[..., Any]
    law: str
    rounding: float

    def sample(self, value=None, shape=(ROWS, COLUMNS)):
        """What it draws in float32, of the usual key where no other is given."""
        return np.asarray(self.draw(key() if value is None else value, shape, jnp.float32))

    def distance(self, values):
        """Kolmogorov's distance from the law, in units of its standard error."""
        return scipy.stats.kstest(values.ravel(), self.law).statistic * np.sqrt(values.size)

    def dependence(self, left, right):
        """Chi-square of a 16 x 16 table of quantiles, in standard deviations from its mean."""
        cdf = getattr(scipy.stats, self.law).cdf
        bins = [np.minimum((cdf(part) * 16).astype(int), 15) for part in (left, right)]
        table = np.bincount(16 * bins[0] + bins[1], minlength=256)
        expected = left.size / 256
        return (((table - expected) ** 2 / expected).sum() - 255) / np.sqrt(2 * 255)


LAPLACE = Stream(variates.laplaces, "laplace", 4e-7)
NORMAL = Stream(variates.normals, "norm", 1e-6)
