"""Differentially private learning without a trusted server, in JAX.

    import dpjax as dp

    plan = dp.make_plan(dp.Config(...), mixing)        calibrated, audited, frozen
    result = dp.run(plan, dp.supervised(...), seeds=range(5))
    print(result.summary())

Names load when they are first used, so that ``import dpjax`` loads no jax. Everything else is
imported by module path, as in ``from dpjax.accounting import views``.
"""

import importlib
from typing import TYPE_CHECKING, Any

from dpjax._version import __version__

if TYPE_CHECKING:
    from dpjax.accounting.guarantee import Guarantee
    from dpjax.algorithms import methods
    from dpjax.commands.account import account
    from dpjax.commands.design import design
    from dpjax.commands.sweep import Sweep, sweep
    from dpjax.data import load as datasets
    from dpjax.data import partition
    from dpjax.engine.estimate import Estimate, estimate
    from dpjax.engine.round import rounds
    from dpjax.engine.run import Result, run
    from dpjax.learning import samplers
    from dpjax.learning.problem import Problem
    from dpjax.learning.quadratics import quadratics
    from dpjax.learning.supervised import supervised
    from dpjax.plans import noise, optimizers
    from dpjax.plans.plan import Config, Plan
    from dpjax.plans.plan import make as make_plan
    from dpjax.plans.protect import Budget, Protect
    from dpjax.topology import graphs, mixing

__all__ = [
    "Budget",
    "Config",
    "Estimate",
    "Guarantee",
    "Plan",
    "Problem",
    "Protect",
    "Result",
    "Sweep",
    "__version__",
    "account",
    "datasets",
    "design",
    "estimate",
    "graphs",
    "make_plan",
    "methods",
    "mixing",
    "noise",
    "optimizers",
    "partition",
    "quadratics",
    "rounds",
    "run",
    "samplers",
    "supervised",
    "sweep",
]

# A module, or a module and a name in it.
_HOMES = {
    "Budget": "plans.protect:Budget",
    "Config": "plans.plan:Config",
    "Estimate": "engine.estimate:Estimate",
    "Guarantee": "accounting.guarantee:Guarantee",
    "Plan": "plans.plan:Plan",
    "Problem": "learning.problem:Problem",
    "Protect": "plans.protect:Protect",
    "Result": "engine.run:Result",
    "Sweep": "commands.sweep:Sweep",
    "account": "commands.account:account",
    "datasets": "data.load",
    "design": "commands.design:design",
    "estimate": "engine.estimate:estimate",
    "graphs": "topology.graphs",
    "make_plan": "plans.plan:make",
    "methods": "algorithms.methods",
    "mixing": "topology.mixing",
    "noise": "plans.noise",
    "optimizers": "plans.optimizers",
    "partition": "data.partition",
    "quadratics": "learning.quadratics:quadratics",
    "rounds": "engine.round:rounds",
    "run": "engine.run:run",
    "samplers": "learning.samplers",
    "supervised": "learning.supervised:supervised",
    "sweep": "commands.sweep:sweep",
}


def __getattr__(name: str) -> Any:
    """Load a name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'dpjax' has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    value = importlib.import_module(f"dpjax.{module}")
    globals()[name] = getattr(value, attribute) if attribute else value
    return globals()[name]


def __dir__() -> list[str]:
    """All names, loaded or not."""
    return __all__
