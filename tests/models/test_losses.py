"""Scores of all records together, beside scikit-learn's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn import metrics

from dpjax.models import losses


@pytest.mark.parametrize("seed", range(3))
def test_scores_of_two_classes_are_scikit_learns(seed):
    random = np.random.default_rng(seed)
    labels = np.where(random.random(40) < 0.3, 1, -1)
    scores = np.round(random.normal(size=40) + labels / 2, 1)  # With ties.
    taken = np.where(scores > 0, 1, -1)
    arguments = (jnp.asarray(scores), jnp.asarray(labels))
    assert losses.auc(*arguments) == pytest.approx(metrics.roc_auc_score(labels, scores), abs=1e-6)
    assert losses.f1(*arguments) == pytest.approx(metrics.f1_score(labels, taken), abs=1e-6)
    balanced = metrics.balanced_accuracy_score(labels, taken)
    assert losses.balanced_accuracy(*arguments) == pytest.approx(balanced, abs=1e-6)


@pytest.mark.parametrize("present", [4, 3])
def test_scores_of_classes_are_scikit_learns_means(present):
    """Where a class is missing, those of the others."""
    random = np.random.default_rng(present)
    labels = random.integers(0, present, 60)
    logits = random.normal(size=(60, 4))
    logits[np.arange(60), labels] += 1
    logits[:, present:] = -9
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    taken = logits.argmax(axis=1)
    arguments = (jnp.asarray(logits), jnp.asarray(labels))
    each = [metrics.roc_auc_score(labels == c, shares[:, c]) for c in range(present)]
    assert losses.auc(*arguments) == pytest.approx(np.mean(each), abs=1e-6)
    macro = metrics.f1_score(labels, taken, average="macro")
    assert losses.f1(*arguments) == pytest.approx(macro, abs=1e-6)
    balanced = metrics.balanced_accuracy_score(labels, taken)
    assert losses.balanced_accuracy(*arguments) == pytest.approx(balanced, abs=1e-6)


def test_metrics_of_classes_promote_no_ranks():
    with jax.numpy_rank_promotion("raise"):
        losses.auc(jnp.eye(3), jnp.arange(3))
