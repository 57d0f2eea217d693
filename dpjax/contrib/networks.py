"""Networks for images by name, on bytes or on numbers."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from dpjax import _validate
from dpjax.contrib import efficientnet, resnet, vit
from dpjax.models import cnn, mlp
from dpjax.models.conv import Layout

__all__ = ["NETWORKS", "Pixels", "network"]

NETWORKS: dict[str, Callable[[int, Layout], nn.Module]] = {
    "mlp": lambda classes, layout: mlp.MLP((32,), classes, "tanh"),
    "small_cnn": lambda classes, layout: cnn.SmallCNN(classes, layout),
    "cnn2": lambda classes, layout: cnn.CNN2(classes, layout),
    "cnn5": lambda classes, layout: cnn.CNN5(classes, layout),
    "wrn16_4": lambda classes, layout: resnet.WideResNet(classes, layout=layout),
    "wrn40_4": lambda classes, layout: resnet.WideResNet(classes, depth=40, layout=layout),
    "resnet50": lambda classes, layout: resnet.ResNet(classes, stem="small", layout=layout),
    "efficientnet": lambda classes, layout: efficientnet.EfficientNet(classes, 1, layout),
    "vit_small": lambda classes, layout: vit.ViT(classes, patch=4, layout=layout),
    "vit_tiny": lambda classes, layout: vit.ViT(classes, 4, 48, 2, 3, layout),
}
"""Networks of so many classes and a layout of convolutions, for images of 28 or 32 pixels; mlp is
for digits of 8."""


class Pixels(nn.Module):
    """A network on bytes, which become numbers from -1 to 1: no statistic of the data.

    Attributes:
        body: The network.
        side: Enlarge images to so many pixels a side, linearly; 0 leaves them.
    """

    body: nn.Module
    side: int = 0

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Return the logits of images."""
        x = x.astype(jnp.float32) / 127.5 - 1
        if self.side:
            shape = (len(x), self.side, self.side, x.shape[-1])
            x = jax.image.resize(x, shape, "bilinear")
        return self.body(x)


def network(name: str, classes: int, layout: Layout = "conv", *, pixels: bool = False) -> nn.Module:
    """Return a network for small images.

    Args:
        name: One of `NETWORKS`.
        classes: Number of classes.
        layout: How convolutions are computed, see `dpjax.models.conv`.
        pixels: Whether images are bytes.

    Raises:
        ValueError: For another name, or a number of classes below 1.

    Example:
        >>> from dpjax.contrib import networks
        >>> type(networks.network("small_cnn", 10)).__name__
        'SmallCNN'
    """
    _validate.one_of("name", name, NETWORKS)
    body = NETWORKS[name](_validate.integer("classes", classes), layout)
    return Pixels(body) if pixels else body
