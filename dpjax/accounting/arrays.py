"""Arrays by their shape, as signatures name them; docstrings say what the axes are."""

import numpy as np
from jaxtyping import Bool, Float, Int

__all__: list[str] = []

Vector = Float[np.ndarray, " n"]
Matrix = Float[np.ndarray, "m n"]
# Of any shape; exact computations have whole numbers or fractions in them.
Numbers = Float[np.ndarray, "..."]
Flags = Bool[np.ndarray, " n"]
Indices = Int[np.ndarray, " n"]
