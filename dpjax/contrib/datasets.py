"""Data sets of an experiment: which there are, and the model that their labels ask for."""

from typing import Any, NamedTuple

import flax.linen as nn
import numpy as np

from dpjax import _validate
from dpjax.data import cache, catalog, load, split
from dpjax.models.linear import Linear
from dpjax.models.mlp import MLP

__all__ = ["Task", "check", "flat", "is_binary"]


def check(dataset: str, argument: str = "dataset", images: bool = False) -> None:
    """Refuse a name that `dpjax.data.load.load` does not take.

    Args:
        dataset: The name: one of the catalog's, or that of an npz file of one's own in the cache.
        argument: What the caller calls it.
        images: Whether the catalog's other records than pictures are refused, too.

    Raises:
        ValueError: For another name; the message lists what there is.

    Example:
        >>> from dpjax.contrib import datasets
        >>> datasets.check("a9a")
    """
    folder = cache.folder()
    choices = []
    for name in load.available(folder):
        entry = catalog.SETS.get(name)
        # What a file of one's own holds is known once it is read.
        if entry is None or entry.images or not images:
            choices.append(name)
    if dataset not in choices:
        raise ValueError(
            f"{argument} is {dataset!r}; choose from {', '.join(choices)}, or put an npz file of "
            f"your own into {folder} and give its name"
        )


def is_binary(labels: np.ndarray) -> bool:
    """Return whether labels are -1 and +1, as the logistic loss takes them.

    Args:
        labels: [N] labels.

    Example:
        >>> import numpy as np
        >>> from dpjax.contrib import datasets
        >>> datasets.is_binary(np.array([1, -1, 1])), datasets.is_binary(np.array([0, 1, 1]))
        (True, False)
    """
    return set(np.unique(labels).tolist()) == {-1, 1}


class Task(NamedTuple):
    """Records, and what is to be learned of them.

    Attributes:
        train: Training examples [N, d] and labels [N].
        test: Test examples and labels.
        model: What is trained.
        loss: A loss by name, as `dpjax.learning.supervised.supervised` takes it.
    """

    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    model: nn.Module
    loss: str


def flat(dataset: str, hidden: int = 0, records: int = 0) -> Task:
    """Read a data set as rows of numbers; bytes of pictures become numbers from -1 to 1.

    Labels -1 and +1 ask for a linear model and the logistic loss; classes for a perceptron, of one
    layer or two, and the cross-entropy.

    Args:
        dataset: As `dpjax.data.load.load` takes it; a fifth is split off as the test part where
            there is none.
        hidden: Width of the hidden layer; 0 is none.
        records: Use only that many training records; 0 is all.

    Raises:
        ValueError: For an unknown data set, or a hidden layer for labels -1 and +1.

    Example:
        >>> from dpjax.contrib import datasets
        >>> task = datasets.flat("breast_cancer", records=100)
        >>> task.train[0].shape, task.loss
        ((100, 30), 'logistic')
    """
    hidden = _validate.integer("hidden", hidden, minimum=0)
    records = _validate.integer("records", records, minimum=0)
    train, test = split.with_test(load.load(dataset), 0.2, seed=1)
    x, y = _numbers(train)
    x = x[: records or None]
    classes = int(y.max()) + 1
    binary = is_binary(y)
    y = y[: records or None]
    if not binary:
        widths = (hidden,) if hidden else ()
        model = MLP(widths, classes, "tanh")
        return Task((x, y), _numbers(test), model, "cross_entropy")
    if hidden:
        raise ValueError(f"hidden is {hidden} for {dataset}, of two classes; give 0")
    return Task((x, y), _numbers(test), Linear(), "logistic")


def _numbers(part: tuple[Any, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Examples as rows of float32, with their labels."""
    x, y = part
    rows = x.reshape(len(x), -1).astype(np.float32)
    if x.dtype == np.uint8:
        rows = rows / 127.5 - 1
    return rows, y
