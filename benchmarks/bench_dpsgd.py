"""Speed of the clipped gradient of a batch against its peers and against the plain gradient.

The sum of clipped per-example gradients of the five-layer network (``cnn5``), a small vision
transformer (``vit_small``) or a residual network, on random 32x32 images: dpjax's by norms,
jax_privacy's clipped_grad, Opacus (where it is installed; written for ``cnn5`` alone), and the mean
gradient without clipping of JAX and of PyTorch. A batch is taken in passes of each number that
``--passes`` names, compiled once and added up; each way is judged by its fastest, and the whole
batch at once is what a way does by default. Ways take turns in one process. With
``--mapped 3`` three models are mapped, as the seeds and plans of a run are, on the same batch.
``times_plain`` is the median time by that of the fastest plain JAX way, of the same repetitions;
``examples_per_second`` is of the median. ``--memory`` adds, for each way's fastest passes, the peak
memory of a process of its own beyond what it had before its first step.

PyTorch's threads would go on spinning through the turns of the others: unless the environment says
otherwise, they sleep (``OMP_WAIT_POLICY=PASSIVE``).
"""

import functools
import itertools
import json
import os
import statistics
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import _timing as timing
from dpjax.contrib import networks
from dpjax.models import layer_norms, losses
from dpjax.transforms import clipping

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before PyTorch is there

CLIP_NORM = 1.0
MODELS = ("cnn5", "vit_small", "wrn16_4", "wrn40_4", "resnet50", "efficientnet")
WAYS = ("plain conv", "plain patches", "dpjax", "jax_privacy", "torch", "opacus", "dpjax patches")
Step = Callable[[], Any]


def data(batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Random images and labels."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(batch, 32, 32, 3)).astype(np.float32), rng.integers(0, 10, batch)


def plain_sum(model: Any) -> Callable[..., Any]:
    """The gradient of the summed loss."""

    def total(params: Any, x: Any, y: Any) -> Any:
        return jnp.sum(losses.cross_entropy(model.apply(params, x), y))

    return jax.grad(total)


def privacy_sum(model: Any) -> Callable[..., Any]:
    """jax_privacy's sum of clipped gradients."""
    from jax_privacy import clipping as peer

    def loss(params: Any, x: Any, y: Any) -> Any:
        return losses.cross_entropy(model.apply(params, x[None])[0], y)

    clipped = peer.clipped_grad(
        loss, batch_argnums=(1, 2), keep_batch_dim=False, l2_clip_norm=CLIP_NORM
    )

    def total(params: Any, x: Any, y: Any) -> Any:
        with warnings.catch_warnings():
            # jax_privacy 2.0.0 calls what optax 0.2.8 deprecates.
            warnings.filterwarnings("ignore", "optax.global_norm is deprecated")
            return clipped(params, x, y)

    return total


def jax_step(name: str, way: str, batch: int, size: int, mapped: int) -> Step:
    """A step in JAX: one compiled pass of all models, called for each part of the batch."""
    model = networks.NETWORKS[name](10, "patches" if way.endswith("patches") else "conv")
    if way.startswith("dpjax"):
        gradients = layer_norms.Gradients(model.apply, losses.cross_entropy)
        of_pass = clipping.clipped_sum(gradients, CLIP_NORM, microbatch=size)
    else:
        of_pass = privacy_sum(model) if way == "jax_privacy" else plain_sum(model)

    init = model.init
    keys = jax.random.key(0)
    if mapped > 1:
        # One model alone is no map of one: its kernels then need no axis.
        of_pass = jax.vmap(of_pass, (0, None, None))
        init = jax.vmap(init, (0, None))
        keys = jax.random.split(keys, mapped)

    def add(total: Any, params: Any, x: Any, y: Any) -> Any:
        return jax.tree.map(jnp.add, total, of_pass(params, x, y))

    add = jax.jit(add)
    x, y = (jnp.asarray(part) for part in data(batch))
    params = jax.jit(init)(keys, x[:1])
    parts = [(x[i : i + size], y[i : i + size]) for i in range(0, batch, size)]
    zeros = jax.tree.map(jnp.zeros_like, params)

    def step() -> Any:
        total = zeros
        for part in parts:
            total = add(total, params, *part)
        return total

    return step


def torch_network() -> Any:
    """The five-layer network in PyTorch."""
    import torch

    layers: list[Any] = []
    widths = [3, 32, 64, 128, 256]
    for index, (before, after) in enumerate(zip(widths, widths[1:], strict=False)):
        layers += [torch.nn.Conv2d(before, after, 3, padding=1), torch.nn.Tanh()]
        layers += [torch.nn.MaxPool2d(2)] if index < 3 else []
        layers += [torch.nn.GroupNorm(16, after)]
    layers += [torch.nn.Conv2d(256, 10, 3, padding=1), torch.nn.AdaptiveAvgPool2d(1)]
    return torch.nn.Sequential(*layers, torch.nn.Flatten())


def torch_step(way: str, batch: int, size: int) -> Step:
    """A step in PyTorch, with Opacus's per-example gradients or without."""
    import torch

    x, y = (torch.as_tensor(part) for part in data(batch))
    x = x.permute(0, 3, 1, 2).contiguous()
    model = torch_network()
    if way == "opacus":
        from opacus import GradSampleModule

        model = GradSampleModule(model, loss_reduction="sum")
    params = list(model.parameters())
    parts = [(x[i : i + size], y[i : i + size]) for i in range(0, batch, size)]

    def clipped(subject: Any) -> Any:
        """As opacus.optimizers.DPOptimizer clips and adds up."""
        each = [param.grad_sample for param in subject]
        norms = torch.stack([item.flatten(1).norm(dim=1) for item in each]).norm(dim=0)
        weights = (CLIP_NORM / (norms + 1e-6)).clamp(max=1.0)
        for param in subject:
            param.grad_sample = None
        return [torch.einsum("i,i...", weights, value) for value in each]

    def step() -> Any:
        total: Any = None
        for inputs, labels in parts:
            model.zero_grad(set_to_none=True)
            torch.nn.functional.cross_entropy(model(inputs), labels, reduction="sum").backward()
            part = clipped(params) if way == "opacus" else [param.grad for param in params]
            total = part if total is None else [a + b for a, b in zip(total, part, strict=True)]
        return total[0].sum().item()

    return step


def make(name: str, way: str, batch: int, size: int, mapped: int) -> Step:
    """A step by way."""
    if way in ("torch", "opacus"):
        return torch_step(way, batch, size)
    return jax_step(name, way, batch, size, mapped)


def there(name: str, mapped: int, way: str) -> bool:
    """Whether a way can be measured: PyTorch has one ``cnn5`` at a time, on the processor alone."""
    if way not in ("torch", "opacus"):
        return True
    single = name == "cnn5" and mapped == 1
    return single and jax.default_backend() == "cpu" and timing.installed(way)


def measure(bench: timing.Bench, options: Any, name: str, batch: int, mapped: int) -> None:
    """All ways on one batch."""
    steps = {}
    for way in filter(functools.partial(there, name, mapped), options.ways):
        for size in sorted({min(size, batch) for size in options.passes}):
            if batch % size == 0:
                steps[way, size] = make(name, way, batch, size, mapped)
    turns = timing.turns({json.dumps(key): step for key, step in steps.items()}, options.repeats)
    results = {tuple(json.loads(text)): value for text, value in turns.items()}
    best: dict[str, int] = {}
    for (way, size), item in results.items():
        if way not in best or item.median < results[way, best[way]].median:
            best[way] = size
    plain = [results[way, size] for way, size in best.items() if way.startswith("plain")]
    minimum = min(plain, key=lambda each: each.median, default=None)
    for (way, size), item in results.items():
        row = {"model": name, "mapped": mapped, "batch_size": batch, "algorithm": way, "pass": size}
        row |= {"fastest": size == best[way], "milliseconds": 1e3 * item.median}
        row["examples_per_second"] = mapped * batch / item.median
        if minimum is not None:
            pairs = zip(item.times, minimum.times, strict=True)
            row["times_plain"] = statistics.median(mine / other for mine, other in pairs)
        bench.row(**row)
    for way, size in best.items() if options.memory else ():
        bench.in_own_process(name, way, batch, size, mapped, repeats=1)


def memory(name: str, way: str, batch: str, size: str, mapped: str) -> int:
    """Print the peak memory of one way's step, in megabytes, as JSON."""
    step = make(name, way, int(batch), int(size), int(mapped))
    before = timing.forget_peak()
    jax.block_until_ready(step())
    row = {"model": name, "mapped": int(mapped), "batch_size": int(batch)}
    row |= {"algorithm": way, "pass": int(size)}
    print(json.dumps(row | {"peak_megabytes": (timing.peak() - before) / 1e6}))
    return 0


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    bench = timing.Bench(__file__, __doc__, repeats=5)
    bench.parser.add_argument("--models", nargs="+", choices=MODELS, default=["cnn5"])
    bench.parser.add_argument("--batches", type=int, nargs="+", default=[64, 256, 1024])
    bench.parser.add_argument("--passes", type=int, nargs="+", default=[8, 32, 64, 256])
    bench.parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS[:-1])
    bench.parser.add_argument("--mapped", type=int, nargs="+", default=[1], metavar="MODELS")
    bench.parser.add_argument("--memory", action="store_true")
    options = bench.parse(argv)
    if options.one:
        return memory(*options.one)
    sizes = itertools.product(options.models, options.batches, options.mapped)
    for name, batch, mapped in sizes:
        measure(bench, options, name, batch, mapped)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
