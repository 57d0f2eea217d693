"""A user's own covariance over agents as a design: checked, scaled to the budget, named."""

import numpy as np
from jaxtyping import Float

from dpjax import _validate
from dpjax.accounting import precision
from dpjax.mechanism import design as design_
from dpjax.mechanism import spatial
from dpjax.topology import mixing as mixing_

__all__: list[str] = []

KIND = "covariance"
"""What a design made of a covariance of the user's is called in its file."""


def design(
    covariance: Float[np.ndarray, "n n"],
    mixing: Float[np.ndarray, "*p n n"],
    precision_bound: float | Float[np.ndarray, " n"],
    name: str,
) -> design_.Design:
    """Return c R with the least c that keeps the bound.

    c = max_i [R^-1]_ii / b_i, so only the shape of R matters, never its scale.

    Guarantee: [(c R)^-1]_ii <= b_i for every agent, with a proven bound on the rounding; the plan
    that is made from it audits the factor that will run, as for every design. It defends against
    outsiders, who do not know the seed from which all agents draw: `Guarantee`.

    Args:
        covariance: [n, n] R over agents, symmetric positive definite, at any scale.
        mixing: [n, n] W, or a schedule [P, n, n].
        precision_bound: b, or [n] b_i.
        name: What records and figures call it.

    Returns:
        The design of kind "covariance"; its value is the energy of one step, tr(W R W').

    Raises:
        ValueError: For a matrix of another size, not symmetric, or singular, indefinite or nearly
            so: some combination of the messages would then go without noise.
    """
    matrix = _validate.square("covariance", covariance)
    weights = np.asarray(mixing, np.float64)
    n = weights.shape[-1]
    if len(matrix) != n:
        raise ValueError(f"covariance is {matrix.shape} for {n} agents; give {(n, n)}")
    largest = float(np.max(np.abs(matrix)))
    if largest > 0:
        # A power of two: nothing is rounded, and squares neither vanish nor overflow.
        matrix = matrix * 2.0 ** -np.round(np.log2(largest))
    limits = spatial.bounds(precision_bound, n)
    diagonal = precision.inverse_diagonal(matrix)
    matrix = (matrix + matrix.T) / 2
    scaled = matrix * (float(np.max(diagonal / limits)) * (1 + 1e-12))
    return design_.Design(
        kind=KIND,
        covariance=scaled,
        mixing_fingerprint=mixing_.fingerprint(weights),
        precision_bound=limits if np.ndim(precision_bound) else float(limits[0]),
        horizon=None,
        value=spatial.energy(scaled, weights),
        lower_bound=None,
        converged=True,
        options={"name": name},
    )
