"""Noise of a diagonal and a polynomial of W: correlated noise for networks of many agents."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PRNGKeyArray
from scipy.sparse.linalg import LinearOperator

from dpjax import _validate
from dpjax.mechanism import polynomial
from dpjax.mechanism.polynomial import PolynomialNoise
from dpjax.plans.calibration import Calibrated, DrawnNoise, OverAgents, PerAgent, Target
from dpjax.plans.compatibility import NoiseTerms
from dpjax.protocols import Arrays, Look
from dpjax.topology import gossip
from dpjax.topology.mixing import HashableMatrix, SquareMatrix
from dpjax.transforms import noise as noise_

__all__ = ["Polynomial"]

_DENSE = 2048


@dataclass(frozen=True)
class Polynomial:
    """Noise S g(W) Z: white noise that agents gossip, times a scale of each.

    It costs a few percent more energy than `Whisper`, and needs no array [n, n]: for thousands of
    agents. It is for one symmetric W. All agents share a seed, from which each computes its own
    noise and that of the agents at most ``degree`` links away.

    Guarantee: an outsider's, who sees every message, whatever gradients depend on. W, S and g are
    those of float32 that a run uses; `dpjax.mechanism.polynomial` has the proof, and refuses
    coefficients that would cancel in float32: rounding changes about a 4,096th of the noise at
    most. Agents who know the seed can subtract the noise. It is a simulation's noise.

    Attributes:
        degree: Degree of g, the products with W in every round, at most: where coefficients of that
            degree would cancel in float32, the highest one that does not is taken.
        horizon: Which noise energy is made small: None is that of one step, "run" that of all
            rounds, or a number of them.

    Example:
        >>> import dpjax as dp
        >>> config = dp.Config(
        ...     noise=dp.noise.Polynomial(horizon="run"), budget=dp.Budget(8.0, delta=1e-5),
        ...     protect=dp.Protect("replace_agent", clip_norm=1.0), rounds=50,
        ...     sampler=dp.samplers.Random(1), optimizer=dp.optimizers.Sgd(0.1),
        ... )
        >>> W = dp.mixing.metropolis_hastings(dp.graphs.ring(300), sparse=True)
        >>> plan = dp.make_plan(config, W)
        >>> round(plan.noise.solution.gap, 2)
        0.03
    """

    degree: int = 6
    horizon: int | Literal["run"] | None = None

    label = "polynomial"
    look = Look("polynomial", "#CC79A7", "+", "--")
    paper = ""
    terms = NoiseTerms(
        released=False,
        known_variance=False,
        why=(
            "all agents draw it from a seed that they share and can subtract, and what float64 "
            "adds to it is not accounted: give attacker='outsider', gradients='any' and "
            "release=False, or dp.noise.Independent()"
        ),
    )
    temporal = False

    def __post_init__(self) -> None:
        """Refuse what is no degree or horizon."""
        _validate.fields(self, _validate.integer, "degree", maximum=32)
        if self.horizon not in (None, "run"):
            remedy = 'give "run", a whole number from 1 to 100000, or leave it out'
            _validate.fields(self, _validate.integer, "horizon", maximum=100_000, remedy=remedy)

    def calibrate(self, target: Target) -> "_CalibratedPolynomial":
        """Make the noise for a budget on a network.

        Args:
            target: What it is for.

        Raises:
            ValueError: For a schedule, or a mixing matrix that is not symmetric.
        """
        rounds = target.rounds if self.horizon == "run" else self.horizon
        # The energy of all rounds depends on how large each step is.
        steps = None if rounds is None else target.config.optimizer.relative(rounds)
        bound = target.precision_bound(None)
        solution = polynomial.design_polynomial(target.mixing, bound, self.degree, step_sizes=steps)
        return _CalibratedPolynomial(solution, polynomial.rounded(target.mixing))


@dataclass(frozen=True, eq=False)
class _CalibratedPolynomial(OverAgents, Calibrated):
    """S g(W) Z as it will run.

    Attributes:
        solution: S and g with their certificate.
        matrix: W as float32 runs hold it.
    """

    solution: PolynomialNoise
    matrix: HashableMatrix

    secrets = "shared"

    @property
    def arrays(self) -> Arrays:
        """The scales S, and the coefficients of g."""
        return {"factor": self.solution.scales, "polynomial": self.solution.coefficients}

    @property
    def factor(self) -> SquareMatrix | None:
        """S g(W) as a matrix, for tables; None beyond 2,048 agents."""
        scales = self.solution.scales
        coefficients = self.solution.coefficients
        # Tables and forecasts of more agents read the operator.
        if len(scales) > _DENSE:
            return None
        return polynomial.noise_map(self.matrix, coefficients, scales).astype(np.float32)

    @property
    def operator(self) -> LinearOperator:
        """S g(W) as what multiplies columns, for any number of agents."""
        solution = self.solution
        return polynomial.operator(self.matrix, solution.coefficients, solution.scales)

    def check(self, target: Target) -> None:
        """Refuse another W than the target's, or arrays of other shapes or types."""
        # A polynomial has any degree, the scales one number an agent.
        shapes = {"factor": (target.agents,), "polynomial": self.arrays["polynomial"].shape[:1]}
        for name, array in self.arrays.items():
            shape = shapes[name]
            if array.shape != shape or array.dtype != np.float32 or not np.isfinite(array).all():
                raise ValueError(
                    f"{name} is {array.dtype} {array.shape}; give finite float32 numbers {shape}"
                )
        # W is part of the map from normals to noise: of another one nothing was proved.
        if self.matrix != polynomial.rounded(target.mixing):
            raise ValueError("noise is of another mixing matrix; make the plan with plan.make")

    def inverse_diagonal(self) -> PerAgent:
        """Upper bounds on [R^-1]_ii."""
        solution = self.solution
        return polynomial.diagonal_bounds(
            self.matrix, solution.coefficients, solution.precision, solution.scales
        )

    def privatizer(self, target: Target) -> DrawnNoise:
        """How it is drawn: no agent alone, as every agent's noise passes all others on its way."""
        return DrawnNoise(_coloured_by_gossip, (target.rounds, self.solution.degree))


def _coloured_by_gossip(
    arrays: Arrays, key: PRNGKeyArray, rounds: int, degree: int
) -> optax.GradientTransformation:
    """Normals are gossiped before they are scaled; W has float32 entries also in float64 models.

    Args:
        arrays: S, the coefficients of g, and W.
        key: The noise key.
        rounds: Rounds that the noise is accounted for.
        degree: That of g, which plans of one run share; the coefficients have it, too.
    """

    def single(part: Array) -> Array:
        # Numbers of neighbours are integers.
        is_integer = not jnp.issubdtype(part.dtype, jnp.floating)
        return part if is_integer else jax.lax.reduce_precision(part, 8, 23)

    mixing = jax.tree.map(single, arrays["mixing"])

    def spread(drawn: Array) -> Array:
        # In the noise's own precision: a release's float64 loses nothing here.
        coefficients = jnp.asarray(arrays["polynomial"]).astype(drawn.dtype)
        return gossip.polynomial(mixing, coefficients, drawn)

    return noise_.correlated(arrays["factor"], key=key, rounds=rounds, spread=spread)
