"""Losses and scores of one example or of many; labels are those of `dpjax.data`."""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from dpjax._numerics import Scalar

__all__ = ["cross_entropy", "logistic", "squared"]

_Numbers = Float[Array, "*b"]


def logistic(score: _Numbers, label: _Numbers) -> _Numbers:
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


def cross_entropy(logits: Float[Array, "*b c"], label: Int[Array, "*b"]) -> _Numbers:
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


def squared(prediction: _Numbers, target: _Numbers) -> _Numbers:
    """Squared error ``(prediction - target)^2`` (no factor one half).

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax.models import losses
        >>> float(losses.squared(jnp.array(3.0), jnp.array(1.0)))
        4.0
    """
    return jnp.square(prediction - target.astype(prediction.dtype))


def sign_accuracy(score: _Numbers, label: _Numbers) -> _Numbers:
    """One where the score has the label's sign (a score of 0 counts as wrong), else zero.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax.models import losses
        >>> float(losses.sign_accuracy(jnp.array(0.3), jnp.array(1)))
        1.0
    """
    return (score * label.astype(score.dtype) > 0).astype(score.dtype)


def multiclass_accuracy(logits: Float[Array, "*b c"], label: Int[Array, "*b"]) -> _Numbers:
    """One where the largest logit is the label's, else zero.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax.models import losses
        >>> float(losses.multiclass_accuracy(jnp.array([0.1, 0.9]), jnp.array(1)))
        1.0
    """
    return (jnp.argmax(logits, axis=-1) == label).astype(logits.dtype)


def _by_class(outputs: Array, labels: Array) -> tuple[Array, Array, Array]:
    """Scores [M, c], whether a record is of the class, and whether it is taken for it.

    Args:
        outputs: Scores [M], for one class, or logits [M, c].
        labels: -1 and +1, or classes 0 .. c-1.
    """
    # One score tells two classes apart, and counts as one class, that of label +1.
    if outputs.ndim == 1:
        scores = outputs[:, None]
        return scores, labels[:, None] > 0, scores > 0
    classes = jnp.arange(outputs.shape[-1])[None, :]
    member = labels[:, None] == classes
    predicted = jnp.argmax(outputs, axis=-1)[:, None] == classes
    return jax.nn.softmax(outputs, axis=-1), member, predicted


def auc(outputs: Array, labels: Array) -> Scalar:
    """Area under the ROC curve, the mean over classes against all others; ties count half.

    Classes without records, or with all of them, are left out.

    Args:
        outputs: Scores [M] or logits [M, c].
        labels: As the loss takes them.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax.models import losses
        >>> scores, labels = jnp.array([0.1, 0.4, 0.35, 0.8]), jnp.array([-1, -1, 1, 1])
        >>> float(losses.auc(scores, labels))
        0.75
    """
    scores, member, _ = _by_class(outputs, labels)

    def of_class(score: Array, is_member: Array) -> tuple[Array, Array]:
        ordered = jnp.sort(score)
        below = jnp.searchsorted(ordered, score, side="left")
        up_to = jnp.searchsorted(ordered, score, side="right")
        count = jnp.sum(is_member)
        rest = jnp.sum(~is_member)
        # The Mann-Whitney statistic: ranks of members, less what members alone would have.
        ranks = jnp.where(is_member, (below + up_to + 1) / 2, 0)
        won = jnp.sum(ranks) - count * (count + 1) / 2
        pairs = jnp.maximum(count * rest, 1).astype(won.dtype)
        return won / pairs, (count > 0) & (rest > 0)

    # A class that everybody or nobody is in has no curve.
    areas, defined = jax.vmap(of_class, in_axes=1)(scores, member)
    total = jnp.sum(jnp.where(defined, areas, 0))
    return total / jnp.sum(defined).astype(areas.dtype)


def f1(outputs: Array, labels: Array) -> Scalar:
    """F1 score, 2 TP / (2 TP + FP + FN): of label +1, or the mean over classes.

    Classes without records that no record is taken for are left out, as in scikit-learn.

    Args:
        outputs: Scores [M] or logits [M, c].
        labels: As the loss takes them.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax.models import losses
        >>> float(losses.f1(jnp.array([0.1, -0.4, 0.3, 0.8]), jnp.array([-1, -1, 1, 1])))
        0.800000011920929
    """
    _, member, predicted = _by_class(outputs, labels)
    # 2 TP + FP + FN are members and predictions added up.
    hits = jnp.sum(member & predicted, axis=0)
    either = jnp.sum(member, axis=0) + jnp.sum(predicted, axis=0)
    scores = 2 * hits / jnp.maximum(either, 1)
    classes = jnp.maximum(jnp.sum(either > 0), 1)
    return jnp.sum(scores) / classes.astype(scores.dtype)


def balanced_accuracy(outputs: Array, labels: Array) -> Scalar:
    """Mean over classes of the share of their records that are taken for them.

    Args:
        outputs: Scores [M] or logits [M, c].
        labels: As the loss takes them.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpjax.models import losses
        >>> scores, labels = jnp.array([0.1, -0.4, 0.3, 0.8]), jnp.array([-1, -1, 1, 1])
        >>> float(losses.balanced_accuracy(scores, labels))
        0.75
    """
    _, member, predicted = _by_class(outputs, labels)
    # Both classes of one score count, as each is half of the mean.
    if outputs.ndim == 1:
        member = jnp.concatenate([~member, member], axis=1)
        predicted = jnp.concatenate([~predicted, predicted], axis=1)
    count = jnp.sum(member, axis=0)
    shares = jnp.sum(member & predicted, axis=0) / jnp.maximum(count, 1)
    return jnp.sum(shares) / jnp.sum(count > 0).astype(shares.dtype)
