"""Arrays and tuples by their shape, as signatures name them; docstrings say what the axes are."""

from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Bool, Float, Int

from dpjax.mechanism.certificate import Vector as Vector

__all__ = ()

Matrix = Float[np.ndarray, "m n"]
# Of any shape; exact computations have whole numbers or fractions in them.
Numbers = Float[np.ndarray, "..."]
Flags = Bool[np.ndarray, " n"]
Indices = Int[np.ndarray, " n"]

Fields: TypeAlias = dict[str, Any]
Floats: TypeAlias = tuple[float, ...]
Ints: TypeAlias = tuple[int, ...]
# How often a record takes part, and how many rounds apart.
Pattern: TypeAlias = tuple[int, int]
# A and B of a view O = A G + B Z.
Sides: TypeAlias = tuple[Matrix, Matrix]
