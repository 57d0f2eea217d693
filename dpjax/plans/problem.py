"""Problems under the path that scripts use; see `dpjax.learning.problem`."""

from dpjax.learning.problem import Problem, quadratics, supervised

__all__ = ["Problem", "quadratics", "supervised"]
