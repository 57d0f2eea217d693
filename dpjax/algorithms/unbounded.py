"""What methods share whose messages carry gradients as they are."""

import math
from typing import Any, ClassVar, Literal

import numpy as np
from jaxtyping import Float

from dpjax.protocols import Seen

__all__: list[str] = []


class Unbounded:
    """Methods that run without noise alone: none is accounted for on what they send."""

    stochastic: ClassVar[Literal["rows", "columns", "double"]] = "double"
    asks_own: ClassVar[bool] = True

    def sensitivity(
        self, answer: Any, steps: Any, divisor: float, mixing: Any
    ) -> Float[np.ndarray, "t 1"]:
        """Without bound: nothing is said of noise on these messages.

        Args:
            answer: How far answers are apart.
            steps: [T] step sizes.
            divisor: What the sampler divides sums by.
            mixing: The mixing matrix.
        """
        return np.full((len(steps), 1), math.inf)

    def released(self, seen: Seen) -> Any:
        """Nothing: no noise was added to any of it."""
        return ()
