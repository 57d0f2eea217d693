"""A config and a model from plain values, as a file of settings holds them.

The values name classes of this package alone, out of the tables below: no value is looked up
anywhere else, and none is called.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any, TypeAlias

from dpjax import _validate
from dpjax.algorithms import methods
from dpjax.learning import samplers
from dpjax.models import cnn, linear, mlp
from dpjax.plans import noise, optimizers, protect
from dpjax.topology import nodes

__all__ = ()

Section: TypeAlias = Mapping[str, Any]
"""A part of the settings, as `tomllib` reads it."""
Sites: TypeAlias = tuple[str, ...]
"""Names of the agents."""
MODELS = {
    "MLP": mlp.MLP, "Linear": linear.Linear, "SmallCNN": cnn.SmallCNN, "CNN2": cnn.CNN2,
    "CNN5": cnn.CNN5,
}  # fmt: skip
MODEL_OPTIONS = {"loss", "metrics", "class_weights"}
"""What the section of the model says of the problem."""
SECTIONS = {
    "data": "[data]", "network": "[network]", "model": "[model]", "protect": "[protect]",
    "budget": "[budget]", "noise": "[[noise]]", "sampler": "[sampler]", "optimizer": "[optimizer]",
    "method": "[method]",
}  # fmt: skip
"""Sections by name, as a file writes them."""
_PARTS = {"noise": noise, "sampler": samplers, "optimizer": optimizers, "method": methods}
"""Sections that name a class, and the modules of these."""


def check_sections(settings: Section, required: Iterable[str]) -> None:
    """Refuse settings that lack something, or whose sections are no sections.

    Args:
        settings: By name.
        required: Names of what must be there.

    Raises:
        ValueError: Naming what is missing, or written otherwise.
    """
    for name in required:
        if name not in settings:
            raise ValueError(
                f"{SECTIONS.get(name, name)} is missing; `dpjax init` writes a whole file"
            )
    for name in SECTIONS.keys() & settings:
        value = settings[name]
        sections = value if name == "noise" else [value]
        if not isinstance(sections, list) or not all(
            isinstance(section, Mapping) for section in sections
        ):
            raise _validate.refusal(name, value, f"write it as a section {SECTIONS[name]}")


def config_parts(settings: Section, sites: Sites) -> dict[str, Any]:
    """Return the arguments of a `Config` by name, of which "noise" is a list of designs.

    Args:
        settings: Sections that were checked, and the rounds.
        sites: Names of the agents, by which the budget may give epsilons.

    Raises:
        ValueError: For what names no class of the package, or what a class refuses.
    """
    # D-SGD is what a file without the section means.
    settings = {"method": {"name": "DSGD"}, "release": False, **settings}
    return {
        # A baseline without noise has no class.
        "noise": [
            None if section == {"name": "None"} else _part("noise", section)
            for section in settings.get("noise", [])
        ],
        "budget": _budget(settings["budget"], sites) if "budget" in settings else None,
        "protect": constructed("protect", protect.Protect, settings["protect"]),
        **{name: _part(name, settings[name]) for name in ("sampler", "optimizer", "method")},
        "rounds": settings["rounds"],
        "release": settings["release"],
    }


def _budget(section: Section, sites: Sites) -> protect.Budget:
    """The budget, whose epsilon may name the sites."""
    budget = dict(section)
    epsilon = section.get("epsilon")
    title = "[budget] epsilon"
    if isinstance(epsilon, Mapping):
        # Two ways to write a letter are one name.
        epsilons = {_validate.name(site): value for site, value in epsilon.items()}
        check_keys(f"{title} ", epsilons, set(sites))
        if {len(epsilon), len(epsilons)} != {len(sites)}:
            remedy = f"give one for each of {[*sites]}"
            raise ValueError(f"{title} is of {sorted(epsilon)}; {remedy}")
        budget["epsilon"] = [epsilons[site] for site in sites]
    elif isinstance(epsilon, list) and nodes.have_names(sites):
        # The order of named sites is the file's, which a list would have to repeat.
        remedy = f"name the sites: {{ {sites[0]!r} = 1.0, ... }}"
        raise ValueError(f"{title} is {epsilon!r}; {remedy}")
    return constructed("budget", protect.Budget, budget)


def titles_of(section: str, keys: Iterable[str]) -> dict[str, str]:
    """What errors call arguments that are keys of a section."""
    return {key: f"{SECTIONS[section]} {key}" for key in keys}


def part_titles(*configs: Section) -> dict[str, str]:
    """What errors call the arguments of configs' parts, and of a run."""
    titles = SECTIONS | {
        "mixing": "[network] mixing", "partition": "[data] partition",
        "checkpoint": "OUT.checkpoint", "key_file": "OUT.key",
    }  # fmt: skip
    for parts in configs:
        for section, part in parts.items():
            # A part that is left out is None, and has no arguments.
            if section in SECTIONS and part is not None:
                titles |= titles_of(section, vars(part))
    return titles


@contextlib.contextmanager
def naming(titles: Mapping[str, str], place: str = "") -> Iterator[None]:
    """Name settings where errors of the block begin with the argument that a setting becomes.

    Args:
        titles: Arguments, and what errors call them: the section and the key, or a file.
        place: What all errors of the block begin with.
    """
    try:
        yield
    except ValueError as error:
        text = str(error)
        # "test y" comes before "test".
        for argument in sorted(titles, key=len, reverse=True):
            if text.startswith(f"{argument} "):
                text = titles[argument] + text.removeprefix(argument)
                break
        raise ValueError(place + text) from error


def _part(section: str, section_values: Section) -> Any:
    """A part by its class's name and its arguments."""
    values = dict(section_values)
    classes = vars(_PARTS[section])
    kinds = {name for name in classes["__all__"] if inspect.isclass(classes[name])}
    # A file has no function for a chain.
    names = sorted(kinds - {"Chain"})
    name = _validate.one_of(f"{SECTIONS[section]} name", values.pop("name", None), names)
    return constructed(section, classes[name], values)


def constructed(section: str, kind: Callable[..., Any], values: Section) -> Any:
    """What a class makes of arguments; lists become tuples."""
    # The class says which settings there are; its own checks say which values.
    parameters = inspect.signature(kind).parameters
    check_keys(f"{SECTIONS[section]} ", values, set(parameters) - {"parent"})
    with naming(titles_of(section, parameters)):
        for name, parameter in parameters.items():
            value = values.get(name, parameter.default)
            # Of *args and **kwargs a class may get none.
            if value is parameter.empty and not str(parameter).startswith("*"):
                raise ValueError(f"{name} is missing; {kind.__name__} needs it (see dpjax init)")
            if isinstance(parameter.default, tuple):
                _validate.entries(name, value)
        return kind(**{name: _tuples(value) for name, value in values.items()})


def check_keys(place: str, values: Section, names: Set[str]) -> None:
    """Refuse a key that nothing reads: a typing error, which would train with a default."""
    for name in values:
        if name not in names:
            remedy = _validate.choice(name, sorted(names))
            raise ValueError(f"{place}{name} is unknown; {remedy}")


def _tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_tuples, value))
    return value
