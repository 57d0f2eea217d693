"""Differentially private learning without a trusted server, in JAX.

    import dpjax as dp

    plan = dp.make_plan(dp.Config(...), mixing)        calibrated, audited, frozen
    result = dp.run(plan, dp.supervised(...), seeds=range(5))
    print(result.summary())

Names load when they are first used, so that ``import dpjax`` loads no jax. Everything else is
imported by module path, as in ``from dpjax.accounting import views``.
"""

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
    from dpjax.engine.run import Result, run
    from dpjax.plans import noise, optimizers, samplers
    from dpjax.plans.plan import Config, Plan
    from dpjax.plans.plan import make as make_plan
    from dpjax.plans.problem import Problem, quadratics, supervised
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
    "run",
    "samplers",
    "supervised",
    "sweep",
]

# Where each name lives: a module with names in it, or a package with modules.
_MODULES = {
    "accounting.guarantee": ["Guarantee"],
    "algorithms": ["methods"],
    "commands.account": ["account"],
    "commands.design": ["design"],
    "commands.sweep": ["Sweep", "sweep"],
    "data": ["partition"],
    "engine.estimate": ["Estimate", "estimate"],
    "engine.run": ["Result", "run"],
    "plans": ["noise", "optimizers", "samplers"],
    "plans.plan": ["Config", "Plan"],
    "plans.problem": ["Problem", "quadratics", "supervised"],
    "plans.protect": ["Budget", "Protect"],
    "topology": ["graphs", "mixing"],
}
_HOMES = {name: (module, name) for module, names in _MODULES.items() for name in names}
_HOMES |= {"datasets": ("data", "load"), "make_plan": ("plans.plan", "make")}


def __getattr__(name: str) -> Any:
    """Load a name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'dpjax' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    value = getattr(__import__(f"dpjax.{module}", fromlist=[attribute]), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """All names, loaded or not."""
    return sorted({*globals(), *_HOMES})
