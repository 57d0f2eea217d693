"""Problems under the path that scripts use; see `dpjax.learning`."""

from dpjax.learning.problem import Problem
from dpjax.learning.quadratics import quadratics
from dpjax.learning.supervised import supervised

__all__ = ["Problem", "quadratics", "supervised"]
