"""A linear score, the model of logistic regression."""

import flax.linen as nn
from jaxtyping import Array, Float

__all__ = ["Linear"]


class Linear(nn.Module):
    """``score = x . w + b`` with zero initial weights, so that every agent and seed starts alike.

    Attributes:
        use_bias: Whether to learn an intercept.
    """

    use_bias: bool = True

    @nn.compact
    def __call__(self, x: Float[Array, "*b f"]) -> Float[Array, "*b"]:
        """Return the scores of ``x``."""
        dense = nn.Dense(1, use_bias=self.use_bias, kernel_init=nn.initializers.zeros_init())
        return dense(x)[..., 0]
