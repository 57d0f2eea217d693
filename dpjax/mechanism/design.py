"""A design of the noise over agents with what it was made for, saved and checked."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
from jaxtyping import Float

from dpjax import _validate
from dpjax.mechanism import spatial, store, workload
from dpjax.mechanism.certificate import Matrix, Vector
from dpjax.topology import mixing as mixing_

__all__ = ["Design", "make"]

KINDS = ("independent", "pairwise", "whisper", "whisper_horizon", "central")


@dataclass(frozen=True, eq=False)
class Design:
    """A covariance over agents, what it was made for, and how good it is.

    Attributes:
        kind: one of ``KINDS``.
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
        options: objective and structure beyond the horizon (discount, final_model, subgroups,
            fingerprints of step sizes and weights), part of what :meth:`check` compares.

    Example:
        >>> from dpjax.mechanism import design
        >>> from dpjax.topology import graphs, mixing
        >>> W = mixing.metropolis_hastings(graphs.ring(4))
        >>> made = design.make("whisper", W, 1.0)
        >>> made.n, made.converged
        (4, True)
    """

    kind: str
    covariance: Matrix | Vector
    mixing_fingerprint: str
    precision_bound: float | Vector
    horizon: int | None
    value: float
    lower_bound: float | None
    converged: bool
    regularization: float = 0.0
    multipliers: Float[np.ndarray, " m"] = field(default_factory=lambda: np.zeros(0))
    options: Mapping[str, Any] = field(default_factory=dict)

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
        mixing: Float[np.ndarray, "*p n n"],
        precision_bound: float | Vector,
        horizon: int | None = None,
    ) -> "Design":
        """Return the design if it was made for these arguments, else raise ValueError.

        Args:
            mixing: the mixing matrix of the run, equal to the last bit.
            precision_bound: the bound the run needs; equal to 1e-12 relative.
            horizon: for ``whisper_horizon`` the rounds it optimised for; None skips that check.
        """
        fingerprint = mixing_.fingerprint(mixing)
        if fingerprint != self.mixing_fingerprint:
            raise ValueError(
                f"mixing has fingerprint {fingerprint[:12]}, the design "
                f"{self.mixing_fingerprint[:12]}; use its matrix, or make the design again"
            )
        wanted, held = (spatial.bounds(b, self.n) for b in (precision_bound, self.precision_bound))
        if not np.allclose(wanted, held, rtol=1e-12, atol=0.0):
            raise ValueError(
                f"precision_bound is {precision_bound!r}, the design's {self.precision_bound!r}; "
                "make the design again"
            )
        if self.horizon is not None and horizon is not None and horizon != self.horizon:
            raise ValueError(
                f"horizon is {horizon!r}, the design's {self.horizon!r}; make the design again"
            )
        return self

    def save(
        self, path: str | os.PathLike[str], *, entries: Mapping[str, Any] | None = None
    ) -> Path:
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
        if taken := sorted({*arrays, *content} & {*(entries or {})}):
            raise ValueError(f"entries has {taken[0]!r}, which is the design's; name it otherwise")
        return store.write(path, "design", arrays | dict(entries or {}), content)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Design":
        """Return the design saved at ``path``; ValueError for a damaged or foreign file."""
        content = store.read(path, "design", {f.name for f in fields(cls)})
        if content["precision_bound"].ndim == 0:
            content["precision_bound"] = float(content["precision_bound"])
        return cls(**content)


def make(
    kind: str,
    mixing: Float[np.ndarray, "*p n n"],
    precision_bound: float | Vector,
    horizon: int | None = None,
    *,
    discount: float | None = None,
    step_sizes: Float[np.ndarray, " t"] | None = None,
    weights: Vector | None = None,
    final_model: bool = False,
    subgroups: Sequence[Sequence[int]] | None = None,
    **options: Any,
) -> Design:
    """Return the design ``kind`` for a mixing matrix and a bound.

    Args:
        kind: "independent", "pairwise" (DECOR), "whisper" (one step), "whisper_horizon" (all
            models of ``horizon`` rounds), or "central" (a reference that breaks the bound).
        mixing: [n, n] W, dense or sparse, or a schedule [P, n, n]. Designs other than "independent"
            compute with the dense matrix.
        precision_bound: b or [n] b_i, from ``accounting.budget.precision_bound``.
        horizon: T; used, and needed unless ``discount`` or ``step_sizes`` is given, by
            "whisper_horizon" only.
        discount: see ``mechanism.workload.factor``.
        step_sizes: likewise; "whisper_horizon" only.
        weights: push-sum weights, every kind.
        final_model: likewise; "whisper_horizon" only.
        subgroups: the whisper kinds only, see ``spatial.whisper``.
        options: of ``factorization.minimize_trace``, the whisper kinds only.

    Returns:
        The design.

    Raises:
        ValueError: for an unknown kind, or options that do not fit it.

    Example:
        >>> from dpjax.mechanism import design
        >>> from dpjax.topology import graphs, mixing
        >>> weights = mixing.metropolis_hastings(graphs.ring(6))
        >>> made = design.make("independent", weights, precision_bound=2.0)
        >>> round(made.value, 3), made.n
        (1.0, 6)
    """
    _validate.one_of("kind", kind, KINDS)
    checked: Any = mixing_.check(mixing, stochastic=None)
    limits = spatial.bounds(precision_bound, checked.shape[-1])
    if kind == "whisper_horizon":
        if horizon is None and discount is None and step_sizes is None:
            raise ValueError(f'kind is "{kind}" without a horizon; give the number of rounds')
        horizon = len(step_sizes) if horizon is None and step_sizes is not None else horizon
    else:
        horizon = None
        if discount is not None or step_sizes is not None or final_model:
            raise ValueError(
                f"kind is {kind!r}, a one-step design; discount, step_sizes and final_model go "
                'with "whisper_horizon"'
            )
    if not kind.startswith("whisper") and (subgroups is not None or options):
        raise ValueError(f"kind is {kind!r}; subgroups and solver options go with whisper kinds")
    quality: dict[str, Any] = {"lower_bound": None, "converged": True}
    if kind == "independent":
        # It needs no dense matrix, and with a sparse one it is stored as its diagonal.
        variances = spatial.independent_variances(limits)
        value = workload.one_step_energy(checked, variances, weights)
        covariance = variances if scipy.sparse.issparse(checked) else np.diag(variances)
    else:
        matrix = mixing_.dense(checked)
        objective: Any = {"discount": discount, "step_sizes": step_sizes}
        objective |= {"final_model": final_model, "weights": weights}
        root = workload.factor(matrix, horizon, **objective)
        if kind == "central":
            covariance = spatial.central(matrix, precision_bound)
        elif kind == "pairwise":
            covariance, bounded = spatial.solve_pairwise(matrix, root, limits)
            quality["converged"] = not bounded
        else:
            covariance, solutions = spatial.solve_whisper(
                root, precision_bound, subgroups=subgroups, **options
            )
            quality = {
                "lower_bound": float(sum(one.lower_bound for one in solutions)) * (1.0 - 1e-14),
                "converged": all(one.converged for one in solutions),
                "regularization": max(one.regularization for one in solutions),
                "multipliers": solutions[0].multipliers if len(solutions) == 1 else np.zeros(0),
            }
        value = float(np.einsum("ij,jk,ik->", root, covariance, root, optimize=True))
    described = {
        "discount": None if discount is None else float(discount),
        "step_sizes": None if step_sizes is None else mixing_.fingerprint(np.asarray(step_sizes)),
        "weights": None if weights is None else mixing_.fingerprint(np.asarray(weights)),
        "final_model": True if final_model else None,
        "subgroups": None
        if subgroups is None
        else [[int(agent) for agent in group] for group in subgroups],
    }
    return Design(
        kind=kind,
        covariance=covariance,
        mixing_fingerprint=mixing_.fingerprint(checked),
        precision_bound=limits if np.ndim(precision_bound) else float(limits[0]),
        horizon=horizon,
        value=value,
        options={name: value for name, value in described.items() if value is not None},
        **quality,
    )
