"""Vision transformers, from a random start or from a file in the layout of timm."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from dpjax import _files, _validate
from dpjax.contrib import weights
from dpjax.contrib.attention import attend
from dpjax.models.conv import Conv, Images, Layout
from dpjax.models.layers import Logits

__all__ = ["ViT", "load_vit"]

_START = nn.initializers.truncated_normal(0.02)


class _Block(nn.Module):
    """Attention and two dense layers, each after a layer norm and added to what came in."""

    heads: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        width = x.shape[-1]
        inner = _norm("norm1")(x)
        projected = self._dense(3 * width, "qkv")(inner)
        query, key, value = jnp.split(projected, 3, axis=-1)
        attended = attend(query, key, value, self.heads)
        x = x + self._dense(width, "proj")(attended)
        inner = _norm("norm2")(x)
        inner = self._dense(4 * width, "fc1")(inner)
        inner = nn.gelu(inner, approximate=False)
        return x + self._dense(width, "fc2")(inner)

    def _dense(self, width: int, name: str) -> nn.Dense:
        return nn.Dense(width, kernel_init=_START, name=name)


def _norm(name: str) -> nn.LayerNorm:
    return nn.LayerNorm(epsilon=1e-6, use_fast_variance=False, name=name)


class ViT(nn.Module):
    """A vision transformer: ViT-S/16 for 224x224 images by default, ``patch=4`` for 32x32.

    Patches as tokens, a class token in front, learned positions, ``depth`` blocks with layer norm
    in front, exact GELU, and a dense layer on the class token. 22,050,664 parameters by default
    with 1,000 classes. No dropout and no stochastic depth.

    Attributes:
        classes: Number of logits.
        patch: Side of a patch, which divides the image's.
        width: Channels of a token.
        depth: Number of blocks.
        heads: Of attention, a divisor of the width.
        layout: Of the convolution that reads patches, see `dpjax.models.conv`.

    Reference:
        Dosovitskiy et al. (2021), An Image is Worth 16x16 Words, arXiv 2010.11929.
        Touvron et al. (2021), Training data-efficient image transformers, arXiv 2012.12877: small.

    Example:
        >>> import jax
        >>> from dpjax.contrib import vit
        >>> model, x = vit.ViT(patch=4, depth=1), jax.ShapeDtypeStruct((2, 32, 32, 3), "float32")
        >>> jax.eval_shape(model.init_with_output, jax.random.key(0), x)[0].shape
        (2, 10)
    """

    classes: int = 10
    patch: int = 16
    width: int = 384
    depth: int = 12
    heads: int = 6
    layout: Layout = "conv"

    @nn.compact
    def __call__(self, x: Images) -> Logits:
        """Return the logits of images."""
        height, width = x.shape[-3:-1]
        if height % self.patch or width % self.patch:
            raise ValueError(f"patch is {self.patch}; give a divisor of the image's {x.shape}")
        if self.width % self.heads:
            raise ValueError(f"heads is {self.heads}; give a divisor of width={self.width}")
        size = (self.patch, self.patch)
        x = Conv(self.width, size, self.patch, "VALID", layout=self.layout, name="patch_embed")(x)
        x = x.reshape(len(x), -1, self.width)
        tiny = nn.initializers.normal(1e-6)
        token = self.param("cls_token", tiny, (1, 1, self.width), jnp.float32)
        length = 1 + x.shape[1]
        places = self.param("pos_embed", _START, (1, length, self.width), jnp.float32)
        tokens = jnp.broadcast_to(token, (len(x), 1, self.width))
        x = jnp.concatenate([tokens, x], axis=1) + places
        for index in range(self.depth):
            x = _Block(self.heads, name=f"block_{index}")(x)
        # The class is read off the token that stands for no patch.
        summary = _norm("norm")(x)[:, 0]
        return nn.Dense(self.classes, kernel_init=_START, name="head")(summary)


def load_vit(
    path: _files.PathLike, model: ViT, image: int = 224, *, key: PRNGKeyArray | None = None
) -> dict[str, Any]:
    """Read a model's parameters from a safetensors file in the layout of timm.

    As of ``vit_small_patch16_224``: ``patch_embed.proj``, ``cls_token``, ``pos_embed``,
    ``blocks.N.norm1``, ``.attn.qkv``, ``.attn.proj``, ``.norm2``, ``.mlp.fc1``, ``.mlp.fc2``,
    ``norm`` and ``head``. Positions are not resized: give images of the file's size.

    Args:
        path: The file, on this machine.
        model: What the file holds; ``classes`` may differ where the head is new.
        image: Side of the images, in pixels.
        key: Draws a new head, for other classes than the file's; None reads the file's.

    Returns:
        Parameters for ``model.apply``, float32.

    Raises:
        ValueError: For tensors that are missing, unknown or of another shape, by name.
    """
    image = _validate.integer("image", image)
    example = jnp.zeros((1, image, image, 3))
    return weights.load_parameters(path, model, example, _name, head="head", key=key)


_INNER = {"qkv": "attn.qkv", "proj": "attn.proj", "fc1": "mlp.fc1", "fc2": "mlp.fc2"}


def _name(path: tuple[str, ...]) -> str:
    """The layout's name of a parameter, but for the last part of it."""
    if path[0].startswith("block_"):
        number = path[0].removeprefix("block_")
        part = _INNER.get(path[1], path[1])
        return f"blocks.{number}.{part}"
    if path[0] == "patch_embed":
        return "patch_embed.proj"
    return path[0]
