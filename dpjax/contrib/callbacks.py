"""Send a run's metrics to TensorBoard or Weights & Biases while it goes on.

Both are the ``callback`` of a run, and end none. Metrics are of test data, and no guarantee covers
them: where these are private, so are the boards.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from dpjax import _files

__all__ = ["tensorboard", "wandb"]


def tensorboard(
    folder: _files.PathLike, labels: Sequence[str] | None = None
) -> Callable[[Any], None]:
    """Write metrics and epsilon of every plan to a folder that TensorBoard shows.

    A tag is ``metric/label``, the mean over seeds; ``epsilon/label`` is what the run guarantees if
    it ends there: where agents' differ the largest, and ``least_epsilon/label`` is the least.

    Args:
        folder: Of the event files.
        labels: Names of the plans; their numbers where None.

    Returns:
        The callback.

    Raises:
        ValueError: Without the package tensorboardX, or for another number of labels, in the run.

    Example:
        >>> import dpjax as dp
        >>> from dpjax.contrib import callbacks
        >>> watch = callbacks.tensorboard("logs", labels=["whisper"])
    """
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise ValueError(
            "tensorboardX is not installed, and event files need it: pip install tensorboardX"
        ) from None
    writer = SummaryWriter(os.fspath(folder), flush_secs=2)  # Its thread writes.

    def callback(progress: Any) -> None:
        for tag, value in _scalars(progress, labels):
            writer.add_scalar(tag, value, progress.round)

    return callback


def wandb(run: Any, labels: Sequence[str] | None = None) -> Callable[[Any], None]:
    """Log metrics and epsilon of every plan to a run of Weights & Biases.

    Args:
        run: What ``wandb.init(...)`` returned; anything with ``log(values, step=round)``.
        labels: As for `tensorboard`.

    Returns:
        The callback.

    Raises:
        ValueError: For a run that cannot log.

    Example:
        >>> import types
        >>> from dpjax.contrib import callbacks
        >>> run = types.SimpleNamespace(log=lambda values, step: print(step, values))
        >>> watch = callbacks.wandb(run)
    """
    if not callable(getattr(run, "log", None)):
        raise ValueError(f"run is {run!r}; give what wandb.init(...) returned")

    def callback(progress: Any) -> None:
        run.log(dict(_scalars(progress, labels)), step=progress.round)

    return callback


def _scalars(progress: Any, labels: Sequence[str] | None) -> Iterator[tuple[str, float]]:
    """Tags and values of one measurement."""
    plans = len(progress.guarantees)
    if labels is None:
        names = list(map(str, range(plans)))
    else:
        names = list(labels)
    if len(names) != plans:
        raise ValueError(f"labels is {labels!r} for {plans} plans; give one a plan")
    for v, (name, guarantee) in enumerate(zip(names, progress.guarantees, strict=True)):
        for metric, values in progress.metrics.items():
            yield f"{metric}/{name}", float(np.mean(values[:, v]))
        if np.isfinite(guarantee.epsilon):
            yield f"epsilon/{name}", float(guarantee.epsilon)
        smallest = min(guarantee.per_agent_epsilon or (guarantee.epsilon,))
        if smallest < guarantee.epsilon:
            yield f"least_epsilon/{name}", float(smallest)
