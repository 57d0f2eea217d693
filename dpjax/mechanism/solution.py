"""What the solver returns: a feasible design and the certificate of how good it is."""

import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
from jaxtyping import Float

from dpjax.mechanism import store

__all__: list[str] = []

_ARRAYS = ("precision", "covariance", "multipliers")


@dataclass(frozen=True, eq=False)
class Solution:
    """A feasible point of  min tr(M P^-1), diag(P) <= 1,  with its certificate.

    Attributes:
        precision: [n, n] P, positive definite; its diagonal is 1 less a rounding margin, so that
            the exact inverse of ``covariance`` has no diagonal entry above 1.
        covariance: [n, n] P^-1 as rounded; the noise covariance at bound 1.
        multipliers: [n] dual variables; a later solve can start from them.
        value: tr(M P^-1), rounded up.
        lower_bound: a lower bound on the infimum, rounded down. Value and bound both refer to M
            itself, never to the regularised one.
        iterations: evaluations of the fixed-point map, over all attempts (0: interior point).
        converged: whether the iteration met its tolerance, for the regularised problem where
            ``regularization`` is not 0. ``gap`` says how close the design is to M's own infimum.
        regularization: r of the term r tr(M)/n I that was added to M, 0 where the infimum is
            attained without.
        variance_ratio: largest variance in the design over that of independent noise under the
            same bound: the range and precision that noise which must cancel asks for.
    """

    precision: Float[np.ndarray, "n n"]
    covariance: Float[np.ndarray, "n n"]
    multipliers: Float[np.ndarray, " n"]
    value: float
    lower_bound: float
    iterations: int
    converged: bool
    regularization: float
    variance_ratio: float

    @property
    def gap(self) -> float:
        """Relative duality gap, value / lower_bound - 1: an upper bound on the excess."""
        return self.value / self.lower_bound - 1.0 if self.lower_bound > 0 else np.inf

    @property
    def attained(self) -> bool:
        """Whether the design solves the problem itself rather than its regularised twin."""
        return self.regularization == 0.0

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the solution to an npz file (complete or not at all) and return its path."""
        content = asdict(self)
        arrays = {name: content.pop(name) for name in _ARRAYS}
        return store.write(path, "solution", arrays, content)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Solution":
        """Return the solution saved at ``path``; ValueError for a damaged or foreign file."""
        arrays, content = store.read(path, "solution")
        if {*arrays, *content} != {field.name for field in fields(cls)}:
            raise ValueError(f"path is {str(path)!r}, which lacks fields; make it again")
        return cls(**arrays, **content)
