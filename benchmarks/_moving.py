"""Noise correlated over rounds in a frame that moves: whose loss is known, and what cancels.

    released   y_t = s_t + a n_t       s_t [k]: a sum of vectors clipped to C, through frame S_t
    decoded    S_t y_t                 S_t [d, k], orthonormal, a function of y_1 .. y_t-1 and keys

A strategy C draws n = B z, B = C^-1, so that noise of one round is taken back in later ones. In a
frame that moves there are four ways to say what was drawn in a round before:

    coordinates   n_t = sum_r B_tr z_r                z_r [k], its numbers as they are
    aligned       n_t = Q_t sum_r B_tr z_r            Q_t [k, k] brings S_t Q_t near S_t-1 Q_t-1
    frame         n_t = sum_r B_tr S_t' S_r z_r       its vector S_r z_r, seen through S_t
    ambient       n_t = sum_r B_tr S_t' w_r           w_r [d], drawn in R^d

Guarantee, for one unit that moves s_t by at most C in the rounds of its participation, adaptively:

- ``coordinates`` is a matrix mechanism of k numbers, and loses C sens(strategy) / a, whatever the
  frames: the same as with a frame that stays.
- ``aligned`` too: Q_t' y_t = Q_t' s_t + a (B z)_t is that mechanism, of vectors as long, and Q_t is
  a function of frames.
- ``ambient`` too: y_t = S_t' Y_t, Y_t = S_t s_t + a (B w)_t a matrix mechanism in R^d.
- ``frame`` does not. Its noise is (M z)_t, M_tr = B_tr S_t' S_r, and what is whitened is M^-1 and
  no longer C: entries of C that vanish because terms cancel (all beyond a band) come back when
  S_t' S_r S_r' S_q is not S_t' S_q. With C's bands as wide as a unit's rounds are apart, one that
  moves s_1 and s_3, and a frame that turns away and back, it loses more: 1.067 times with bands
  (1, 1/2), 1.29 with (1, 1).

What cancels: of a round's z taken back in the next (B_t+1,t = -1) there stays, in squares, for
principal angles x_i between the two frames,

    aligned 2 sum_i (1 - cos x_i)   <=   ambient 2 sum_i sin^2 x_i,       white noise: k

and no orthogonal way is better than ``aligned`` (Procrustes). So noise taken back helps along
columns that turn by less than 60 degrees a round, and harms along new random probes, whose angle is
near 90. ``aligned`` costs k draws a round, ``ambient`` d; the numbers sent are the same.

All is float64.

Reference:
    Denisov, McMahan, Rush, Smith, Thakurta, Improved differential privacy for SGD via optimal
    private linear operators on adaptive streams (2022), for adaptive inputs of lower triangular
    strategies; Schoenemann (1966), orthogonal Procrustes.
"""

from typing import Literal

import numpy as np
from jaxtyping import Float

__all__ = ["DRAWS", "loss", "running", "turns"]

Draws = Literal["coordinates", "aligned", "frame", "ambient"]

DRAWS = ("coordinates", "aligned", "frame", "ambient")
"""Ways to take noise of earlier rounds back; see the module."""


def turns(frames: Float[np.ndarray, "t d k"]) -> Float[np.ndarray, "t k k"]:
    """Return the rotations Q_t with which each frame comes as near as it can to the one before.

    Q_1 is the identity, and Q_t the orthogonal factor of S_t' S_t-1 Q_t-1: it has the largest trace
    of Q' S_t' S_t-1 Q_t-1 among all orthogonal Q, and so the least |S_t Q - S_t-1 Q_t-1|.

    Args:
        frames: S_t [T, d, k], orthonormal columns.
    """
    results = [np.eye(frames.shape[2])]
    for before, frame in zip(frames[:-1], frames[1:], strict=True):
        left, _, right = np.linalg.svd(frame.T @ before @ results[-1])
        results.append(left @ right)
    return np.stack(results)


def running(
    strategy: Float[np.ndarray, "t t"],
    frames: Float[np.ndarray, "t d k"],
    draws: Draws = "aligned",
) -> Float[np.ndarray, "t d d"]:
    """Return the covariance of the running sum of decoded noise, sum_{r <= t} S_r n_r, by round.

    Args:
        strategy: C [T, T], lower triangular.
        frames: S_t [T, d, k], orthonormal columns.
        draws: One of `DRAWS`.

    Returns:
        [T, d, d], for a = 1.
    """
    blocks = _drawn(strategy, frames, draws)
    decoded = np.einsum("tdk,tkrm->tdrm", frames, blocks).cumsum(axis=0)
    factors = decoded.reshape(*decoded.shape[:2], -1)
    return factors @ factors.transpose(0, 2, 1)


def loss(
    strategy: Float[np.ndarray, "t t"],
    frames: Float[np.ndarray, "t d k"],
    moves: Float[np.ndarray, "t k"],
    draws: Draws = "aligned",
) -> float:
    """Return mu of what was released between inputs that far apart, for frames that came out.

    The whitened moves |(M M')^(-1/2) moves|, M the map from draws to n, at a = 1. For all but
    ``frame`` it is at most the strategy's sensitivity where `moves` are within a participation.

    Args:
        strategy: C [T, T], lower triangular.
        frames: S_t [T, d, k], orthonormal columns.
        moves: How far s_t moves, [T, k].
        draws: One of `DRAWS`.
    """
    blocks = _drawn(strategy, frames, draws).reshape(moves.size, -1)
    # The least norm of draws that make the moves, which is the whitened one.
    result = np.linalg.lstsq(blocks, moves.ravel(), rcond=None)[0]
    return float(np.linalg.norm(result))


def _drawn(
    strategy: Float[np.ndarray, "t t"], frames: Float[np.ndarray, "t d k"], draws: str
) -> Float[np.ndarray, "t k t m"]:
    """M: noise of round t in its frame, of the draws of round r."""
    inverse = np.linalg.inv(strategy)
    if draws == "coordinates":
        return np.einsum("tr,ij->tirj", inverse, np.eye(frames.shape[2]))
    if draws == "aligned":
        return np.einsum("tr,tij->tirj", inverse, turns(frames))
    if draws == "frame":
        return np.einsum("tr,tdi,rdj->tirj", inverse, frames, frames)
    return np.einsum("tr,tdi->tird", inverse, frames)
