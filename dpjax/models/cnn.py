"""Two small networks with tanh that the literature of private learning trains from scratch."""

import flax.linen as nn

from dpjax.models.conv import Conv, Images, Layout
from dpjax.models.layers import Logits, average, group_norm, max_pool

__all__ = ["CNN2", "CNN5", "SmallCNN"]


class CNN5(nn.Module):
    """Five 3x3 convolutions, 32-64-128-256-classes channels, for 32x32 images.

    The first three are followed by tanh, 2x2 max-pooling and a group norm of 16 groups, the fourth
    by tanh and a group norm; the logits are the fifth's, averaged over the image. 412,426
    parameters for 3 channels and 10 classes. No statistics of a batch, no dropout.

    Attributes:
        classes: Number of logits.
        layout: Of the convolutions, see `dpjax.models.conv`.

    Reference:
        Zhang et al. (2024), DOPPLER: Differentially Private Optimizers with Low-pass Filter for
        Privacy Noise Reduction. As in the authors' code.

    Example:
        >>> import jax, numpy as np
        >>> from dpjax.models import cnn
        >>> images = np.zeros((2, 32, 32, 3), np.float32)
        >>> params = jax.eval_shape(cnn.CNN5().init, jax.random.key(0), images)
        >>> sum(leaf.size for leaf in jax.tree.leaves(params))
        412426
    """

    classes: int = 10
    layout: Layout = "conv"

    @nn.compact
    def __call__(self, x: Images) -> Logits:
        """Return the logits of images."""
        for index, features in enumerate((32, 64, 128, 256)):
            convolution = Conv(features, padding=1, layout=self.layout, name=f"Conv_{index}")
            x = nn.tanh(convolution(x))
            # The fourth keeps its places, which the fifth averages.
            if index < 3:
                x = max_pool(x, 2, 2)
            x = group_norm(16, name=f"GroupNorm_{index}")(x)
        last = Conv(self.classes, padding=1, layout=self.layout, name="Conv_4")
        return average(last(x))


class CNN2(nn.Module):
    """Two 5x5 convolutions of 16 and 32 channels and a dense layer, for MNIST.

    Each convolution, padded to the same size, is followed by a group norm of 8 groups, relu and 2x2
    max-pooling. 29,034 parameters for 28x28 images of one channel and 10 classes. Group norms stand
    where the paper has batch norms, whose statistics tell of the batch and would have to be sent.

    Attributes:
        classes: Number of logits.
        layout: Of the convolutions, see `dpjax.models.conv`.

    Reference:
        Xie, Liu and Chai (2025), section 6.2, whose channels are not
        printed.

    Example:
        >>> import jax
        >>> from dpjax.models import cnn
        >>> model, x = cnn.CNN2(), jax.ShapeDtypeStruct((2, 28, 28, 1), "float32")
        >>> jax.eval_shape(model.init_with_output, jax.random.key(0), x)[0].shape
        (2, 10)
    """

    classes: int = 10
    layout: Layout = "conv"

    @nn.compact
    def __call__(self, x: Images) -> Logits:
        """Return the logits of images."""
        for index, features in enumerate((16, 32)):
            # Named as flax would name them, so that stored parameters have their places.
            x = Conv(features, (5, 5), 1, "SAME", layout=self.layout, name=f"Conv_{index}")(x)
            x = group_norm(8, name=f"GroupNorm_{index}")(x)
            x = max_pool(nn.relu(x), 2, 2)
        x = x.reshape(*x.shape[:-3], -1)
        return nn.Dense(self.classes)(x)


class SmallCNN(nn.Module):
    """Two convolutions and two dense layers with tanh, for MNIST.

    Convolutions 8x8 by 2 to 16 channels (padded to the same size) and 4x4 by 2 to 32 (not padded),
    each with tanh and 2x2 max-pooling by 1; dense layers of 32 and of the classes. 26,010
    parameters for 28x28 images of one channel and 10 classes. No statistics of a batch, no dropout.

    Attributes:
        classes: Number of logits.
        layout: Of the convolutions, see `dpjax.models.conv`.

    Reference:
        Papernot et al. (2021), Tempered Sigmoid Activations for Deep Learning with Differential
        Privacy, arXiv 2007.14191, Table 1.

    Example:
        >>> import jax
        >>> from dpjax.models import cnn
        >>> model, x = cnn.SmallCNN(), jax.ShapeDtypeStruct((2, 28, 28, 1), "float32")
        >>> jax.eval_shape(model.init_with_output, jax.random.key(0), x)[0].shape
        (2, 10)
    """

    classes: int = 10
    layout: Layout = "conv"

    @nn.compact
    def __call__(self, x: Images) -> Logits:
        """Return the logits of images."""
        # Named as flax would name them, whatever the order in which they are made.
        first = Conv(16, (8, 8), 2, "SAME", layout=self.layout, name="Conv_0")
        second = Conv(32, (4, 4), 2, "VALID", layout=self.layout, name="Conv_1")
        x = max_pool(nn.tanh(first(x)), 2, 1)
        x = max_pool(nn.tanh(second(x)), 2, 1)
        x = x.reshape(*x.shape[:-3], -1)
        x = nn.tanh(nn.Dense(32)(x))
        return nn.Dense(self.classes)(x)
