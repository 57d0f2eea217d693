"""A multilayer perceptron."""

from collections.abc import Sequence

import flax.linen as nn
from jaxtyping import Array, Float

__all__ = ["MLP"]


class MLP(nn.Module):
    """Dense layers with tanh between them, a bounded activation that suits clipped training.

    Attributes:
        hidden: Widths of the hidden layers.
        outputs: Width of the last layer (the number of classes).
    """

    hidden: Sequence[int] = (64,)
    outputs: int = 10

    @nn.compact
    def __call__(self, x: Float[Array, "*b f"]) -> Float[Array, "*b c"]:
        """Return the logits of ``x``."""
        for width in self.hidden:
            x = nn.tanh(nn.Dense(width)(x))
        return nn.Dense(self.outputs)(x)
