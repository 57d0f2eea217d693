"""Random variants of images: mirrored, shifted by a few pixels, or both.

Each is a pure function ``augment(key, x) -> x`` of one image [height, width, channels] of any
dtype, for ``dp.supervised(..., augment=..., augmentation_multiplicity=K)``. None looks at other
images or at statistics of the data.
"""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, Shaped

from dpjax import _validate

__all__ = ["Shift", "standard"]


@dataclass(frozen=True)
class Shift:
    """Shift by up to so many pixels each way: pad on all sides, then crop to the size at random.

    Attributes:
        pixels: Padding on each side.
        filling: What comes in: "reflect", the image mirrored at its edge, or "zeros".
        mirror: Whether left and right are exchanged first, with probability 1/2.

    Example:
        >>> import jax, numpy as np
        >>> from dpjax.contrib.augmentation import Shift
        >>> Shift(4)(jax.random.key(0), np.zeros((32, 32, 3), np.uint8)).shape
        (32, 32, 3)
    """

    pixels: int = 4
    filling: Literal["reflect", "zeros"] = "reflect"
    mirror: bool = False

    def __post_init__(self) -> None:
        """Refuse what is no number of pixels."""
        object.__setattr__(self, "pixels", _validate.integer("pixels", self.pixels))
        _validate.one_of("filling", self.filling, ("reflect", "zeros"))
        _validate.flag("mirror", self.mirror)

    def __call__(self, key: PRNGKeyArray, x: Shaped[Array, "h w c"]) -> Shaped[Array, "h w c"]:
        """Return a shifted image.

        Args:
            key: Decides, each of the (2 pixels + 1)^2 places alike.
            x: [height, width, channels].

        Raises:
            ValueError: For a shape of other axes, or a size that cannot be reflected so far.
        """
        sides = jnp.shape(x)[:2]
        if jnp.ndim(x) != 3 or min(sides) <= self.pixels:
            raise ValueError(
                f"x has the shape {jnp.shape(x)}; give [height, width, channels] of more than "
                f"{self.pixels} pixels each way, or fewer pixels to shift by"
            )
        if self.mirror:
            mirrored = jax.random.bernoulli(jax.random.fold_in(key, 0))
            key = jax.random.fold_in(key, 1)
            x = jnp.where(mirrored, jnp.flip(x, axis=1), x)
        around = [(self.pixels, self.pixels)] * 2 + [(0, 0)]
        mode: Any = "reflect" if self.filling == "reflect" else "constant"
        padded = jnp.pad(x, around, mode)
        begin = jax.random.randint(key, (2,), 0, 2 * self.pixels + 1)
        return jax.lax.dynamic_slice(padded, (*begin, 0), jnp.shape(x))


standard = Shift(mirror=True)
"""Mirrored or not, and shifted by up to four pixels: the customary ones for CIFAR.

Reference:
    De et al. (2022), Unlocking High-Accuracy Differentially Private Image Classification through
    Scale.
"""
