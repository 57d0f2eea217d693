"""The kinds of noise by name: ``dpjax.noise``."""

from dpjax.plans.integers import Discrete
from dpjax.plans.links import PairKeys, ZeroSum
from dpjax.plans.noise import (
    Aggregate,
    AntiPgd,
    Covariance,
    Independent,
    Mafalda,
    Pairwise,
    PrefixSum,
    SpaceTime,
    Whisper,
    named,
)
from dpjax.plans.scheduled import Laplace, Normal

__all__ = [
    "Aggregate",
    "AntiPgd",
    "Covariance",
    "Discrete",
    "Independent",
    "Laplace",
    "Mafalda",
    "Normal",
    "PairKeys",
    "Pairwise",
    "PrefixSum",
    "SpaceTime",
    "Whisper",
    "ZeroSum",
    "named",
]
