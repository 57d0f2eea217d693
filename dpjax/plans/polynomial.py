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
from dpjax.accounting import precision
from dpjax.mechanism import polynomial, spatial
from dpjax.mechanism.design import Design
from dpjax.mechanism.polynomial import PolynomialNoise
from dpjax.plans.calibration import (
    Calibrated,
    DrawnNoise,
    Factored,
    OverAgents,
    PerAgent,
    Target,
    float32_factor,
)
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
        known_variance=False,
        why=(
            "all agents draw it from a seed that they share and can subtract: give "
            "attacker='outsider' and gradients='any', or dp.noise.Independent()"
        ),
    )
    temporal = False

    def __post_init__(self) -> None:
        """Refuse what is no degree or horizon."""
        _validate.fields(self, _validate.integer, "degree", maximum=32)
        if self.horizon not in (None, "run"):
            remedy = 'give "run", a whole number from 1 to 100000, or leave it out'
            _validate.fields(self, _validate.integer, "horizon", maximum=100_000, remedy=remedy)

    def calibrate(self, target: Target) -> "_CalibratedPolynomial | Factored":
        """Make the noise for a budget on a network.

        Args:
            target: What it is for.

        Returns:
            What is gossiped; of a release a factor.

        Raises:
            ValueError: For a schedule, a mixing matrix that is not symmetric, or one of a release
                whose dense form memory does not hold.
        """
        rounds = target.rounds if self.horizon == "run" else self.horizon
        # The energy of all rounds depends on how large each step is.
        steps = None if rounds is None else target.config.optimizer.relative(rounds)
        bound = target.precision_bound(None)
        solution = polynomial.design_polynomial(target.mixing, bound, self.degree, step_sizes=steps)
        noise = _CalibratedPolynomial(solution, polynomial.rounded(target.mixing))
        if not target.config.release:
            return noise
        # Beyond memory the dense W is refused.
        shape = noise.operator @ np.eye(len(target.dense))
        # By exact losses in place of bounds on them: no agent has more noise than its budget asks.
        shape *= np.sqrt(precision.inverse_diagonal(factor=shape) / bound)[:, None]
        covariance = shape @ shape.T
        energy = spatial.energy(covariance, target.dense)
        design = Design.of(self.label, target.network, bound, covariance, energy)
        return Factored(float32_factor(covariance, bound), None, design)


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
        agents = len(self.solution.scales)
        # Tables and forecasts of more agents read the operator.
        return None if agents > _DENSE else (self.operator @ np.eye(agents)).astype(np.float32)

    @property
    def operator(self) -> LinearOperator:
        """S g(W) as what multiplies columns, for any number of agents."""
        solution = self.solution
        return polynomial.operator(self.matrix, solution.coefficients, solution.scales)

    def check(self, target: Target) -> None:
        """Refuse another W than the target's, or arrays of other shapes or types."""
        for name, array in self.arrays.items():
            # A polynomial has any degree, the scales one number an agent.
            shape = (target.agents,) if name == "factor" else array.shape[:1]
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
        is_real = jnp.issubdtype(part.dtype, jnp.floating)
        return jax.lax.reduce_precision(part, 8, 23) if is_real else part

    mixing = jax.tree.map(single, arrays["mixing"])

    def spread(drawn: Array) -> Array:
        # In the noise's own precision: a release's float64 loses nothing here.
        coefficients = jnp.asarray(arrays["polynomial"], drawn.dtype)
        return gossip.polynomial(mixing, coefficients, drawn)

    return noise_.correlated(arrays["factor"], key=key, rounds=rounds, spread=spread)
