"""Losses and scores of one example or of many; labels are those of `dpjax.data`."""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

__all__ = ["cross_entropy", "logistic", "squared"]

Numbers = Float[Array, "*b"]


def logistic(score: Numbers, label: Numbers) -> Numbers:
    """Logistic loss ``log(1 + exp(-label * score))`` for labels -1 and +1.

    Args:
        score: Real-valued scores.
        label: Labels -1 or +1, of the same shape.

    Returns:
        The loss of each example, in nats.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax.models import losses
        >>> round(float(losses.logistic(jnp.zeros(()), jnp.ones(()))), 4)
        0.6931
    """
    return jax.nn.softplus(-label.astype(score.dtype) * score)


def cross_entropy(logits: Float[Array, "*b c"], label: Int[Array, "*b"]) -> Numbers:
    """Softmax cross-entropy for integer labels 0 .. c-1.

    Args:
        logits: Unnormalised log-probabilities.
        label: Class indices.

    Returns:
        The loss of each example, in nats.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax.models import losses
        >>> round(float(losses.cross_entropy(jnp.zeros(2), jnp.array(1))), 4)
        0.6931
    """
    return optax.softmax_cross_entropy_with_integer_labels(logits, label.astype(jnp.int32))


def squared(prediction: Numbers, target: Numbers) -> Numbers:
    """Squared error ``(prediction - target)^2`` (no factor one half).

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax.models import losses
        >>> float(losses.squared(jnp.array(3.0), jnp.array(1.0)))
        4.0
    """
    return jnp.square(prediction - target.astype(prediction.dtype))


def sign_accuracy(score: Numbers, label: Numbers) -> Numbers:
    """One where the score has the label's sign (a score of 0 counts as wrong), else zero.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax.models import losses
        >>> float(losses.sign_accuracy(jnp.array(0.3), jnp.array(1)))
        1.0
    """
    return (score * label.astype(score.dtype) > 0).astype(score.dtype)


def multiclass_accuracy(logits: Float[Array, "*b c"], label: Int[Array, "*b"]) -> Numbers:
    """One where the largest logit is the label's, else zero.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax.models import losses
        >>> float(losses.multiclass_accuracy(jnp.array([0.1, 0.9]), jnp.array(1)))
        1.0
    """
    return (jnp.argmax(logits, axis=-1) == label).astype(logits.dtype)
