"""Differentially private learning without a trusted server, in JAX.

    import dpjax as dp

    plan = dp.make_plan(dp.Config(...), mixing)        calibrated, audited, frozen
    result = dp.run(plan, dp.supervised(...), seeds=range(5))
    print(result.summary())

Names load when they are first used, so that ``import dpjax`` loads no jax. Everything else is
imported by module path, as in ``from dpjax.accounting import views``.
"""

import ast
from pathlib import Path
from typing import Any

from dpjax._version import __version__ as __version__

# The stub is the only list of names: type checkers read it, and so does this module.
_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_HOMES: dict[str, tuple[str, str]] = {}
for _statement in _STUB.body:
    if isinstance(_statement, ast.ImportFrom):
        for _alias in _statement.names:
            _HOMES[str(_alias.asname)] = (str(_statement.module), _alias.name)
    elif isinstance(_statement, ast.Assign):
        _name, _import = ast.unparse(_statement).split(" = ")
        _HOMES[_name] = _HOMES.pop(_import)
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Load a name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'dpjax' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    # With a list of names, this imports those of them that are modules.
    value = getattr(__import__(module, fromlist=[attribute]), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """All names, loaded or not."""
    return __all__
