"""Image classifiers by name, as problems of one agent that holds all records."""

from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np

from dpjax import _validate
from dpjax.contrib import augmentation, networks, vit
from dpjax.data import load, partition, split
from dpjax.learning.problem import Problem
from dpjax.learning.supervised import supervised
from dpjax.models.conv import Layout

__all__ = ["Images", "read"]

_DIGITS = ("digits", "mnist")


class Images(NamedTuple):
    """Images, their classes, and the network that is to tell these.

    Attributes:
        dataset: Name of the data set.
        train: Training images [N, ...] and classes [N].
        test: Test images and classes.
        model: The network.
        params: What training starts from; None is a start at random for each seed.
    """

    dataset: str
    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    model: nn.Module
    params: Any = None

    def problem(
        self, train: Any, test: Any, augmentation_multiplicity: int = 0, **options: Any
    ) -> Problem:
        """Return the one agent's problem.

        Args:
            train: Images and classes trained on.
            test: Images and classes measured on.
            augmentation_multiplicity: Random variants of an image, shifted, and mirrored but for
                digits, averaged before the clip; 0 has none.
            options: More of `dpjax.learning.supervised.supervised`.
        """
        # A mirrored digit is another sign.
        shifted = augmentation.Shift(2, "zeros")
        augment = shifted if self.dataset in _DIGITS else augmentation.standard
        if augmentation_multiplicity:
            options["augment"] = augment
            options["augmentation_multiplicity"] = augmentation_multiplicity
        options |= {} if self.params is None else {"params": self.params}
        shard = partition.iid(len(train[1]), 1, 0)
        return supervised(
            self.model, "cross_entropy", train, test, shard, name=self.dataset, **options
        )


def read(
    dataset: str, model: str, layout: Layout = "conv", records: int = 0, weights: Path | None = None
) -> Images:
    """Read a data set of images, with the network of a name for it.

    Args:
        dataset: As `dpjax.data.load.load` takes it; a fifth is split off as the test part where
            there is none.
        model: One of `dpjax.contrib.networks.NETWORKS`.
        layout: How convolutions are computed.
        records: Use only that many training records; 0 is all.
        weights: A safetensors file of vit_small_patch16_224 to start from, which is then the
            network, with pictures enlarged to its 224 pixels and a new head.

    Raises:
        ValueError: For an unknown data set or model, a negative number of records, or weights of
            another network or for what is no picture.

    Example:
        >>> from dpjax.contrib import images
        >>> digits = images.read("digits", "mlp", records=100)
        >>> len(digits.train[1]), len(digits.test[1])
        (100, 359)
    """
    records = _validate.integer("records", records, minimum=0)
    _validate.one_of("model", model, networks.NETWORKS)
    train, test = split.with_test(load.load(dataset), 0.2, seed=1)
    x, y = (part[: records or None] for part in train)
    classes = int(y.max()) + 1
    if weights is not None:
        if model != "vit_small" or x.dtype != np.uint8:
            raise ValueError(
                f"weights are of ViT-S/16 for pictures, and model is {model!r} on {dataset}; give "
                "model='vit_small' and a data set of pictures, or no weights"
            )
        return Images(dataset, (x, y), test, *_pretrained(weights, classes, layout))
    network = networks.network(model, classes, layout, pixels=x.dtype == np.uint8)
    return Images(dataset, (x, y), test, network)


def _pretrained(weights: Path, classes: int, layout: Layout) -> tuple[nn.Module, Any]:
    """The network of the file on enlarged pictures, and its parameters."""
    body = vit.ViT(classes, layout=layout)
    loaded = vit.load_vit(weights, body, key=jax.random.key(0))
    return networks.Pixels(body, side=224), {"params": {"body": loaded["params"]}}
