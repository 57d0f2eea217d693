"""When a record appears: k times, exactly b rounds apart."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from dpjax import _validate

__all__ = ["Participation"]


@dataclass(frozen=True)
class Participation:
    """A record appears ``epochs`` times, exactly ``separation`` rounds apart.

    (T, 1, T) is one participation at any round; (T, T, 1) is every round.

    Attributes:
        rounds: T.
        epochs: how many times a record appears.
        separation: rounds from one appearance to the next.

    Raises:
        ValueError: when no start fits, start + (epochs - 1) separation >= rounds.

    Example:
        >>> from dpjax.mechanism.participation import Participation
        >>> Participation(rounds=6, epochs=2, separation=3).patterns.tolist()
        [[0, 3], [1, 4], [2, 5]]
    """

    rounds: int
    epochs: int
    separation: int

    def __post_init__(self) -> None:
        _validate.fields(self, _validate.integer, "rounds", "epochs", "separation")
        if self.starts < 1:
            raise ValueError(
                f"participation is ({self.rounds}, {self.epochs}, {self.separation}): "
                f"{self.epochs} appearances {self.separation} rounds apart need "
                f"{(self.epochs - 1) * self.separation + 1} rounds; lower epochs or separation"
            )

    @property
    def starts(self) -> int:
        """Number of patterns: every start s with s + (epochs - 1) separation < rounds."""
        # The last appearance of a pattern is in one of the T rounds.
        return self.rounds - (self.epochs - 1) * self.separation

    @property
    def patterns(self) -> Int[np.ndarray, "starts epochs"]:
        """The rounds of each pattern, [starts, epochs]."""
        return np.arange(self.starts)[:, None] + self.separation * np.arange(self.epochs)


def check_participation(value: object) -> Participation:
    """Return a participation as it is.

    Args:
        value: What was given as ``participation``.

    Raises:
        ValueError: For anything else, such as a tuple.
    """
    if not isinstance(value, Participation):
        raise ValueError(
            f"participation is {value!r}; give a "
            "mechanism.participation.Participation(rounds, epochs, separation)"
        )
    return value
