"""Image classifiers by name, as problems of one agent that holds all records."""

from typing import Any, NamedTuple

import flax.linen as nn
import numpy as np

from dpjax import _validate
from dpjax.data import augmentation, load, partition, split
from dpjax.models import images
from dpjax.models.conv import Layout
from dpjax.plans import problem

__all__ = ["Images", "read"]

_DIGITS = ("digits", "mnist")


class Images(NamedTuple):
    """Images, their classes, and the network that is to tell these.

    Attributes:
        dataset: Name of the data set.
        train: Training images [N, ...] and classes [N].
        test: Test images and classes.
        model: The network.
    """

    dataset: str
    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    model: nn.Module

    def problem(self, train: Any, test: Any, copies: int = 0, **options: Any) -> problem.Problem:
        """Return the one agent's problem.

        Args:
            train: Images and classes trained on.
            test: Images and classes measured on.
            copies: Random variants of an image, shifted, and mirrored but for digits, averaged
                before the clip; 0 has none.
            options: More of `dpjax.plans.problem.supervised`, as ``params`` to start from.
        """
        # A mirrored digit is another sign.
        shifted = augmentation.Shift(2, "zeros")
        augment = shifted if self.dataset in _DIGITS else augmentation.standard
        options |= {"augment": augment, "copies": copies} if copies else {}
        shard = partition.iid(len(train[1]), 1, 0)
        return problem.supervised(
            self.model, "cross_entropy", train, test, shard, name=self.dataset, **options
        )


def read(dataset: str, model: str, layout: Layout = "conv", records: int = 0) -> Images:
    """Read a data set of images, with the network of a name for it.

    Args:
        dataset: As `dpjax.data.load.load` takes it; a fifth is split off as the test part where
            there is none.
        model: One of `dpjax.models.images.NETWORKS`.
        layout: How convolutions are computed.
        records: Use only that many training records; 0 is all.

    Raises:
        ValueError: For an unknown data set or model, or a negative number of records.

    Example:
        >>> from dpjax.plans import images
        >>> digits = images.read("digits", "mlp", records=100)
        >>> len(digits.train[1]), len(digits.test[1])
        (100, 359)
    """
    records = _validate.integer("records", records, least=0)
    _validate.one_of("model", model, images.NETWORKS)
    train, test = split.with_test(load.load(dataset), 0.2, seed=1)
    x, y = (part[: records or None] for part in train)
    classes = int(y.max()) + 1
    network = images.network(model, classes, layout, pixels=x.dtype == np.uint8)
    return Images(dataset, (x, y), test, network)
