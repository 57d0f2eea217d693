"""A multilayer perceptron, and its weighted sums of per-example gradients."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

__all__ = ["MLP", "weighted_gradients"]

_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"tanh": nn.tanh, "relu": nn.relu}


class MLP(nn.Module):
    """Dense layers with an activation between them.

    Attributes:
        hidden: Widths of the hidden layers.
        outputs: Width of the last layer (the number of classes); None is one number an example,
            without an axis of its own, for regression.
        activation: "tanh", bounded, which suits clipped training, or "relu".
    """

    hidden: Sequence[int] = (64,)
    outputs: int | None = 10
    activation: Literal["tanh", "relu"] = "tanh"

    @nn.compact
    def __call__(self, x: Float[Array, "*b f"]) -> Float[Array, "*b c"]:
        """Return the logits of ``x``, or one number an example."""
        for width in self.hidden:
            x = _ACTIVATIONS[self.activation](nn.Dense(width)(x))
        x = nn.Dense(1 if self.outputs is None else self.outputs)(x)
        return x[..., 0] if self.outputs is None else x


def weighted_gradients(
    model: MLP,
    loss: Callable[[Array, Array], Array],
    params: Any,
    x: Float[Array, "b f"],
    y: Array,
    weights: Callable[[Float[Array, " b"]], Float[Array, " b"]],
) -> Any:
    """A weighted sum of per-example gradients whose weights depend on the gradients' norms.

    sum_b w_b grad loss(model(x_b), y_b) with w = weights(norms). A dense layer's gradient is the
    outer product of its input (with a 1 for the bias) and the loss's derivative d_b by the layer's
    output: its norm is sqrt(1 + |a_b|^2) |d_b|, and the sum is one matrix product, so that no
    per-example gradient is ever formed. The d_b in norm and sum are the same numbers.

    Guarantee: the norms are those of the summed terms up to a relative rounding of half the inputs
    and outputs of the largest layer plus 16 units, or are infinite or nan; an example of such a
    norm, or of weight 0, adds exactly zero.

    Args:
        model: The network.
        loss: ``loss(outputs, y)``, elementwise over examples, as in `dpjax.models.losses`.
        params: Of one agent.
        x: [B, f] examples, finite; integers are taken as the kernels' numbers.
        y: [B] labels.
        weights: From the [B] norms to the [B] weights, at most 1.

    Returns:
        The sum, a tree like params.

    Reference:
        Goodfellow (2015), Efficient per-example gradient computations.
    """
    layers = params["params"]
    if not jnp.issubdtype(x.dtype, jnp.floating):
        # Squares of integers would wrap around, and the norms with them.
        x = x.astype(layers["Dense_0"]["kernel"].dtype)
    names = [f"Dense_{index}" for index in range(len(model.hidden) + 1)]
    activation = _ACTIVATIONS[model.activation]

    def forward(shifts: list[Array]) -> tuple[Array, list[Array]]:
        inputs, hidden = [], x
        for name, shift in zip(names, shifts, strict=True):
            inputs.append(hidden)
            out = hidden @ layers[name]["kernel"] + layers[name]["bias"] + shift
            hidden = activation(out)
        outputs = out[..., 0] if model.outputs is None else out
        return jnp.sum(loss(outputs, y)), inputs

    biases = [layers[name]["bias"] for name in names]
    zeros = [jnp.zeros((len(x), len(bias)), bias.dtype) for bias in biases]
    derivatives, inputs = jax.grad(forward, has_aux=True)(zeros)
    squares = jnp.zeros(len(x), zeros[0].dtype)
    for layer_input, derivative in zip(inputs, derivatives, strict=True):
        # Scaled, so that squares of small derivatives cannot vanish.
        top = jnp.max(jnp.abs(derivative), axis=1)
        scaled = derivative / jnp.where(top > 0, top, 1)[:, None]
        lengths = top * jnp.sqrt(jnp.sum(jnp.square(scaled), axis=1))
        lengths = lengths * jnp.sqrt(1 + jnp.sum(jnp.square(layer_input), axis=1))
        squares = squares + jnp.square(lengths)
    chosen = weights(jnp.sqrt(squares))
    used = (chosen > 0) & jnp.isfinite(squares)
    total = {}
    for name, layer_input, derivative in zip(names, inputs, derivatives, strict=True):
        # Selected, not multiplied by zero: infinity times zero is nan.
        derivative = jnp.where(used[:, None], derivative * chosen[:, None], 0)
        layer_input = jnp.where(used[:, None], layer_input, 0)
        kernel = jnp.matmul(layer_input.T, derivative, precision=jax.lax.Precision.HIGHEST)
        total[name] = {"kernel": kernel, "bias": jnp.sum(derivative, axis=0)}
    return {"params": total}
