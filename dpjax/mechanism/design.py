"""A design of the noise over agents with what it was made for, saved and checked."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from scipy.sparse import issparse

from dpjax._files import PathLike
from dpjax.mechanism import spatial, store, workload
from dpjax.mechanism.certificate import Vector
from dpjax.mechanism.spatial import Bound, Subgroups, bounds
from dpjax.topology import mixing as mixing_
from dpjax.topology.mixing import HashableMatrix, Mixing, SquareMatrix

__all__ = ["Design"]

_Network: TypeAlias = Mixing | HashableMatrix
"""W or a schedule of them; one with its digest has been checked."""
_Covariance: TypeAlias = SquareMatrix | Vector
"""R, or its diagonal."""


@dataclass(frozen=True, eq=False)
class Design:
    """A covariance over agents, what it was made for, and how good it is.

    Attributes:
        kind: what records call the design.
        covariance: [n, n] R; its diagonal [n] for independent noise of a sparse mixing matrix.
        mixing_fingerprint: sha256 of the mixing matrix it was made for.
        precision_bound: b, or [n] b_i, that [R^-1]_ii keeps ("central" breaks it).
        horizon: T of the objective, None for one step.
        value: tr(M R), the noise energy under its own objective.
        lower_bound: no design of the same trust structure has less energy; None if not known
            (only the whisper kinds are certified).
        converged: whether the solver met its tolerance; False also for a pairwise design whose
            coupling ran into its bound.
        regularization: largest r that was added; 0 where the optimum is attained.
        multipliers: [n] dual variables to start a similar solve from; empty if none.
        options: objective and structure beyond the horizon (subgroups, max_variance,
            fingerprints of step sizes and weights); a plan compares all of them.

    Example:
        >>> from dpjax.mechanism.design import Design
        >>> from dpjax.topology import graphs, mixing
        >>> W = mixing.metropolis_hastings(graphs.ring(4))
        >>> solved = Design.whisper(W, 1.0)
        >>> solved.n, solved.converged
        (4, True)
    """

    kind: str
    covariance: _Covariance
    mixing_fingerprint: str
    precision_bound: Bound
    horizon: int | None
    value: float
    lower_bound: float | None
    converged: bool
    regularization: float = 0.0
    multipliers: Vector = field(default_factory=lambda: np.zeros(0))
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        kind: str,
        network: HashableMatrix,
        precision_bound: Bound,
        covariance: _Covariance,
        value: float,
        *,
        lower_bound: float | None = None,
        converged: bool = True,
        horizon: int | None = None,
        options: Mapping[str, Any] | None = None,
        **quality: Any,
    ) -> "Design":
        """Return the design of a covariance that keeps the bound on a network.

        Args:
            kind: what records call it.
            network: the mixing matrix, checked.
            precision_bound: b or [n] b_i that the covariance keeps.
            covariance: [n, n] R, or its diagonal [n].
            value: its noise energy.
            lower_bound: as the field.
            converged: as the field.
            horizon: as the field.
            options: as the field; those that are None are left out.
            quality: the fields with defaults.
        """
        limits = bounds(precision_bound, covariance.shape[0])
        return cls(
            kind,
            covariance,
            network.fingerprint,
            limits if np.ndim(precision_bound) else float(limits[0]),
            horizon,
            value,
            lower_bound,
            converged,
            options={name: value for name, value in (options or {}).items() if value is not None},
            **quality,
        )

    @property
    def n(self) -> int:
        """Number of agents."""
        return int(self.covariance.shape[0])

    @property
    def gap(self) -> float | None:
        """Relative excess over ``lower_bound``, an upper bound; None if that is not known."""
        return self.value / self.lower_bound - 1.0 if self.lower_bound else None

    @property
    def fingerprint(self) -> str:
        """The sha256 of R's bits, for agents who solve for themselves to compare."""
        return mixing_.fingerprint(self.covariance)

    def check(
        self,
        mixing: _Network,
        precision_bound: Bound,
    ) -> "Design":
        """Return the design if it was made for these arguments, else raise ValueError.

        Args:
            mixing: the mixing matrix of the run, equal to the last bit.
            precision_bound: the bound the run needs; equal to 1e-12 relative.
        """
        fingerprint = _checked(mixing).fingerprint
        if fingerprint != self.mixing_fingerprint:
            raise ValueError(
                f"mixing has fingerprint {fingerprint[:12]}, the design "
                f"{self.mixing_fingerprint[:12]}; use its matrix, or make the design again"
            )
        needed = bounds(precision_bound, self.n)
        limits = bounds(self.precision_bound, self.n)
        # Bounds of one budget may differ by rounding.
        if not np.allclose(needed, limits, rtol=1e-12, atol=0.0):
            raise ValueError(
                f"precision_bound is {precision_bound!r}, the design's {self.precision_bound!r}; "
                "make the design again"
            )
        return self

    def save(self, path: PathLike, *, entries: Mapping[str, Any] | None = None) -> Path:
        """Write the design to an npz file (complete or not at all) and return its path.

        Args:
            path: where to; ``.npz`` is appended when there is no suffix.
            entries: numbers, texts and arrays to keep beside it for other readers, under names of
                their own; :meth:`load` passes over them. A plan's ``save`` gives its terms.
        """
        content = {f.name: getattr(self, f.name) for f in fields(self)}
        arrays = {name: content.pop(name) for name in ("covariance", "multipliers")}
        arrays["precision_bound"] = np.asarray(content.pop("precision_bound"))
        content["options"] = dict(content["options"])
        # Entries of the same name would overwrite the design's.
        clashes = sorted({*arrays, *content} & {*(entries or {})})
        if clashes:
            raise ValueError(
                f"entries has {clashes[0]!r}, which is the design's; name it otherwise"
            )
        return store.write_arrays(path, "design", arrays | dict(entries or {}), content)

    @classmethod
    def load(cls, path: PathLike) -> "Design":
        """Return the design saved at ``path``; ValueError for a damaged or foreign file."""
        content = store.read_arrays(path, "design", {f.name for f in fields(cls)})
        if content["precision_bound"].ndim == 0:
            content["precision_bound"] = float(content["precision_bound"])
        return cls(**content)

    @classmethod
    def independent(cls, mixing: _Network, precision_bound: Bound) -> "Design":
        """Return R = diag(1 / b_i): every agent on its own.

        Args:
            mixing: [n, n] W, dense or sparse, or a schedule [P, n, n].
            precision_bound: b or [n] b_i, from ``accounting.budget.precision_bound``.

        Returns:
            The design; of a sparse matrix it holds the diagonal alone.

        Raises:
            ValueError: for a bad mixing matrix or bound.

        Example:
            >>> from dpjax.mechanism.design import Design
            >>> from dpjax.topology import graphs, mixing
            >>> W = mixing.metropolis_hastings(graphs.ring(6))
            >>> alone = Design.independent(W, precision_bound=2.0)
            >>> round(alone.value, 3), alone.n
            (1.0, 6)
        """
        network = _checked(mixing)
        matrix = network.matrix
        variances = spatial.independent_variances(bounds(precision_bound, matrix.shape[-1]))
        value = workload.one_step_energy(matrix, variances)
        # With a sparse W no array [n, n] is needed.
        covariance = variances if issparse(matrix) else np.diag(variances)
        return cls.of("independent", network, precision_bound, covariance, value)

    @classmethod
    def pairwise(cls, mixing: _Network, precision_bound: Bound) -> "Design":
        """Return the design of `spatial.pairwise` (DECOR) for one step.

        Args:
            mixing: as for `independent`; computed with the dense matrix.
            precision_bound: likewise.

        Returns:
            The design; not converged where its coupling ran into its bound.

        Raises:
            ValueError: as `independent`.

        Example:
            >>> from dpjax.mechanism.design import Design
            >>> from dpjax.topology import graphs, mixing
            >>> Design.pairwise(mixing.metropolis_hastings(graphs.ring(6)), 1.0).converged
            True
        """
        network = _checked(mixing)
        matrix = network.dense.matrix
        limits = bounds(precision_bound, matrix.shape[-1])
        root = workload.factor(network)
        covariance, bounded = spatial.solve_pairwise(matrix, root, limits)
        value = spatial.trace(root, covariance)
        return cls.of(
            "pairwise", network, precision_bound, covariance, value, converged=not bounded
        )

    @classmethod
    def whisper(
        cls,
        mixing: _Network,
        precision_bound: Bound,
        horizon: int | None = None,
        *,
        step_sizes: workload.StepSizes = None,
        weights: Vector | None = None,
        subgroups: Subgroups = None,
        max_variance: float | None = None,
        **options: Any,
    ) -> "Design":
        """Return the design of least noise energy, in one step or in all models of a run.

        Args:
            mixing: as for `independent`; computed with the dense matrix.
            precision_bound: likewise.
            horizon: T; None is one step, unless ``step_sizes`` is given.
            step_sizes: see ``mechanism.workload.factor``.
            weights: likewise.
            subgroups: see ``spatial.whisper``.
            max_variance: see ``factorization.minimize_trace``.
            options: more of ``factorization.minimize_trace``.

        Returns:
            The certified design, "whisper" of one step and "whisper_horizon" of more.

        Raises:
            ValueError: for a bad mixing matrix or bound, or options that do not go together.

        Example:
            >>> from dpjax.mechanism.design import Design
            >>> from dpjax.topology import graphs, mixing
            >>> W = mixing.metropolis_hastings(graphs.ring(6))
            >>> Design.whisper(W, 1.0).kind, Design.whisper(W, 1.0, horizon=9).kind
            ('whisper', 'whisper_horizon')
        """
        network = _checked(mixing)
        root = workload.factor(network, horizon, step_sizes=step_sizes, weights=weights)
        covariance, solutions = spatial.solve_whisper(
            root, precision_bound, subgroups=subgroups, max_variance=max_variance, **options
        )
        if horizon is None and step_sizes is not None:
            horizon = len(step_sizes)
        # What a later check compares, beside the horizon.
        structure = {
            "step_sizes": _digest(step_sizes),
            "weights": _digest(weights),
            "subgroups": None if subgroups is None else [[*map(int, group)] for group in subgroups],
            # Of no limit inf: files from before options held it have none.
            "max_variance": math.inf if max_variance is None else float(max_variance),
        }
        # Multipliers of several blocks start no solve of the whole.
        multipliers = solutions[0].multipliers if len(solutions) == 1 else np.zeros(0)
        return cls.of(
            "whisper" if horizon is None else "whisper_horizon",
            network,
            precision_bound,
            covariance,
            spatial.trace(root, covariance),
            horizon=horizon,
            # Rounded down, as sums of bounds may round up.
            lower_bound=float(sum(solution.lower_bound for solution in solutions)) * (1.0 - 1e-14),
            converged=all(solution.converged for solution in solutions),
            regularization=max(solution.regularization for solution in solutions),
            options=structure,
            multipliers=multipliers,
        )


def _checked(mixing: _Network) -> HashableMatrix:
    """The mixing matrix with its digest; one that has it was checked."""
    if isinstance(mixing, HashableMatrix):
        return mixing
    return HashableMatrix(mixing_.check_mixing(mixing, stochastic=None))


def _digest(numbers: Vector | None) -> str | None:
    return None if numbers is None else mixing_.fingerprint(np.asarray(numbers))
