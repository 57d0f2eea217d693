"""A multilayer perceptron."""

from collections.abc import Callable, Sequence
from typing import Literal

import flax.linen as nn
from jaxtyping import Array, Float

__all__ = ["MLP"]

_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"tanh": nn.tanh, "relu": nn.relu}


class MLP(nn.Module):
    """Dense layers with an activation between them.

    Attributes:
        hidden: Widths of the hidden layers.
        outputs: Width of the last layer (the number of classes); None is one number an example,
            without an axis of its own, for regression.
        activation: "tanh", bounded, which suits clipped training, or "relu".

    Example:
        >>> import jax
        >>> from dpjax.models import mlp
        >>> model, x = mlp.MLP((32,), 5), jax.ShapeDtypeStruct((2, 8), "float32")
        >>> jax.eval_shape(model.init_with_output, jax.random.key(0), x)[0].shape
        (2, 5)
    """

    hidden: Sequence[int] = (64,)
    outputs: int | None = 10
    activation: Literal["tanh", "relu"] = "tanh"

    @nn.compact
    def __call__(self, x: Float[Array, "*b f"]) -> Float[Array, "*b c"]:
        """Return the logits of ``x``, or one number an example."""
        for width in self.hidden:
            x = _ACTIVATIONS[self.activation](nn.Dense(width)(x))
        width = 1 if self.outputs is None else self.outputs
        x = nn.Dense(width)(x)
        # Targets of regression have no axis of classes.
        if self.outputs is None:
            return x[..., 0]
        return x
