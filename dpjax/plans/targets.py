"""What the noise of a config is made for, on a network."""

import numpy as np

from dpjax.plans.calibration import Target
from dpjax.plans.config import Config
from dpjax.protocols import Method, Networked, Sampler

__all__: list[str] = []


def of(config: Config, mixing: np.ndarray, counts: np.ndarray | None = None) -> Target:
    """Return what the noise of a config is made for.

    Args:
        config: A private config.
        mixing: [n, n] or [P, n, n] mixing matrix.
        counts: [n] records of each agent, where the sampler must know them.

    Raises:
        ValueError: For a config without a budget.
    """
    if config.budget is None:
        raise ValueError("budget is None; a config without noise keeps none")
    rates = None
    # Where the sampler claims them, and so keeps to the rules of those that do.
    if counts is not None and config.sampler.capacity is not None:
        rates = config.sampler.rates(counts)
    divisor = counted(config.sampler, counts).divisor if config.protect.clips == "record" else 1
    return Target(
        mixing,
        config.budget,
        config.protect,
        config.pattern,
        config.optimizer.relative,
        config.method,
        config.optimizer.first,
        divisor,
        rates,
    )


def counted(sampler: Sampler, counts: np.ndarray | None) -> Sampler:
    """Return a sampler told how many records there are, where it must know.

    Args:
        sampler: Which records take part.
        counts: [n] records of each agent, or None.
    """
    return sampler if counts is None else sampler.holding(int(counts.max()))


def on(method: Method | Networked, mixing: np.ndarray) -> Method:
    """Return a method on its network; most are the same on all.

    Args:
        method: What agents compute, keep and send.
        mixing: [n, n] or [P, n, n] mixing matrix.
    """
    return method.on(mixing) if isinstance(method, Networked) else method
