"""A linear score, the model of logistic regression."""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

__all__ = ["Linear"]


class Linear(nn.Module):
    """``score = x . w + b`` with zero initial weights, so that every agent and seed starts alike.

    Attributes:
        use_bias: Whether to learn an intercept.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from dpjax.models.linear import Linear
        >>> Linear().init(jax.random.key(0), jnp.ones((1, 3)))["params"]["weight"].tolist()
        [0.0, 0.0, 0.0]
    """

    use_bias: bool = True

    @nn.compact
    def __call__(self, x: Float[Array, "*b f"]) -> Float[Array, "*b"]:
        """Return the scores of ``x``."""
        zeros = nn.initializers.zeros_init()
        weight = self.param("weight", zeros, (x.shape[-1],), jnp.float32)
        if x.size == x.shape[-1]:
            # One example, as in per-record gradients: without the axis of length one they compile
            # to code that is five times faster.
            score = jnp.dot(x.reshape(-1), weight)
            score = score.reshape(x.shape[:-1])
        else:
            score = jnp.matmul(x, weight)
        if self.use_bias:
            score = score + self.param("bias", zeros, (), jnp.float32)
        return score
