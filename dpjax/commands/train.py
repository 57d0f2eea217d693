"""Train from a file of settings: `dpjax train` and `dpjax init`."""

import importlib
import inspect
import os
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

import flax.linen as nn
import numpy as np
import tyro

from dpjax import _files, _validate
from dpjax.accounting.rounding import up
from dpjax.commands import inputs
from dpjax.data import catalog, load, partition, split
from dpjax.engine.run import Checkpoint
from dpjax.engine.run import run as run_
from dpjax.learning.problem import Problem
from dpjax.learning.supervised import supervised
from dpjax.plans import noise
from dpjax.plans import plan as plan_
from dpjax.plans.settings import (
    MODEL_OPTIONS,
    MODELS,
    SECTIONS,
    Section,
    Sites,
    check_keys,
    check_sections,
    config_parts,
    constructed,
    naming,
    part_titles,
    titles_of,
)
from dpjax.topology import nodes

__all__ = ()

TEMPLATE = """\
# Settings of a private training run: dpjax train THIS_FILE
# Names are classes of dpjax (dp.noise, dp.samplers, dp.optimizers, dp.methods); what stands below a
# name are its arguments. The manual explains these under "Parts of a config".

rounds = 100            # messages that every agent sends
seeds = [0, 1, 2]       # one run each, for means and standard errors
out = "run"             # folder for the result, its rows and a report; must not exist
release = false         # a simulation: do not publish its models. A release (true) is for it, with
                        # one seed and one [[noise]]: the page "Publish: a release" of the manual.
                        # Its key is in OUT.key until it ends; with OUT.checkpoint, the same command
                        # resumes it.

[data]
name = "digits"         # `dpjax data` lists the data sets; NAME.npz in the cache is yours
partition = "iid"       # or "owner"; or "dirichlet" with alpha = 0.5, by labels: no releases
seed = 0
# Write NAME.npz by numpy.savez: x_train [N, ...], y_train [N], x_test, y_test; or x and y, of which
# a share is held out for testing (test = 0.2). For partition = "owner" it also has owner [N], the
# agent of each record of x (or of x_train), by its name in the file of edges.

[network]
graph = "er:8:0.5"      # ring:N, grid:R:C, complete:N, ..., or a file of edges, two names a line,
                        # whose weights are ignored
mixing = "metropolis"   # weights of a message: metropolis (symmetric) or uniform

[model]
name = "MLP"            # MLP, Linear, SmallCNN, CNN2, CNN5, or "own:Net" of own.py beside this file
# outputs = 10          # not for Linear; else the largest label plus one, which counts as public
hidden = [32]
loss = "cross_entropy"  # Linear takes logistic (labels -1 and +1), or squared
metrics = []            # beside the accuracy: "auc", "f1", "balanced_accuracy"
# class_weights = [1.0, 0.2]  # factors of the training loss, one a class; -1 comes before +1

[protect]
relation = "zero_out_record"  # what is hidden: one record; "replace_agent" hides all of an agent
clip_norm = 1.0         # largest norm of a record's (or agent's) gradient

[budget]
epsilon = 4.0           # of the whole run; or one a site, by name: { North = 1.0, "St Mary" = 2.0 }
delta = 1e-5            # below one over the number of records (or agents)

[[noise]]               # every [[noise]] is trained, side by side
name = "Independent"    # each agent's own: nobody needs to trust anybody; "None" is a baseline

[[noise]]
name = "Whisper"        # correlated between agents, who share a seed
horizon = "run"

[sampler]
name = "Full"           # all records each round; or Random, Poisson, Cyclic

[optimizer]
name = "Sgd"
step_size = 1.0
"""

_PLAIN = {"rounds", "seeds", "out", "eval_every", "release"}


def init_command(path: tyro.conf.Positional[Path] = Path("dpjax.toml")) -> int:
    """Write a commented file of settings, for dpjax train.

    Args:
        path: The file; must not exist.
    """
    if os.path.exists(path):
        raise ValueError(f"path is {str(path)!r}, which exists; name another file")
    with _files.writing("path", path):
        _files.create(path, TEMPLATE.encode())
    print(f"written: {path}; now: dpjax train {path}")
    return 0


def train_command(path: tyro.conf.Positional[Path], out: Path | None = None) -> int:
    """Train privately from a file of settings.

    Prints the last metrics and the guarantees, and writes the result, its rows and a report of one
    page. dpjax init writes a file to begin with: eight agents learn digits under two noise designs.

    Example: dpjax train dpjax.toml

    Args:
        path: The file of settings.
        out: Folder to write to, in place of the file's; must not exist.
    """
    if not path.exists():
        raise ValueError(f"{path} is not there; dpjax init writes one")
    remedy = "mend the line that is named, or save it as UTF-8; `dpjax init` writes a whole file"
    with _files.reading(path, remedy):
        # Windows writes a byte order mark, which TOML does not know.
        text = path.read_text(encoding="utf-8-sig")
        settings = tomllib.loads(text)
    place = "--out" if out else f"{path}, out"
    out = out or settings.get("out", "run")
    if not isinstance(out, str | Path) or not str(out).strip():
        raise ValueError(f"{place} is {out!r}; give the name of a folder, as text")
    folder = Path(out).expanduser()
    if os.path.lexists(folder):
        remedy = "name another or delete it (a second release spends epsilon again)"
        raise ValueError(f"{place} is {str(folder)!r}, which exists; {remedy}")
    # A simulation in its place would look like the release, and its key would be lost.
    if not settings.get("release", False) and os.path.exists(f"{folder}.key"):
        raise ValueError(
            f"{place} is {str(folder)!r}, where a release is unfinished, as {folder}.key says; "
            "name another folder, or end the release first"
        )
    # A model may be in a file beside the settings, which hides no installed module.
    sys.path.append(str(path.resolve().parent))
    with naming({}, f"{path}, "):
        plans, task = read_settings(settings)
    storage = None
    if plans[0].config.release:
        storage = Checkpoint(f"{folder}.checkpoint", key_file=f"{folder}.key")
    # Under another name until all is there: whoever finds the folder finds a whole result, and the
    # same command writes that of a release which was stopped here.
    part = folder.with_name(f".{folder.name}.{os.urandom(4).hex()}")
    with _files.writing(place, folder):
        # Tried now: after hours of training a folder that refuses is too late.
        part.mkdir(parents=True)
        part.rmdir()
    with naming(part_titles(*(vars(plan.config) for plan in plans)), f"{path}, "):
        result = run_(
            plans,
            task,
            seeds=settings.get("seeds", [0]),
            checkpoint=storage,
            eval_every=settings.get("eval_every"),
            progress=True,
        )
    try:
        with _files.writing(place, folder):
            part.mkdir()
            _files.create(part / "settings.toml", text.encode())
        result.save(part / "result.npz")
        result.to_csv(part / "rows.csv")
        result.report(part / "report.html")
    except BaseException:
        # Half a result looks like a whole one.
        shutil.rmtree(part, ignore_errors=True)
        raise
    with _files.writing(f"{place}, with the result in {part},", folder):
        os.rename(part, folder)
    print(result.summary())
    # Equal guarantees are stated once.
    for caption in dict.fromkeys(guarantee.caption() for guarantee in result.guarantees):
        print(caption)
    for plan in plans:
        print(f"\n{noise.display_name(plan.config.label)}:\n{plan.protection()}")
        epsilons = plan.guarantee.per_agent_epsilon
        if epsilons:
            pairs = zip(task.partition.names or range(len(epsilons)), epsilons, strict=True)
            print("epsilon by agent: " + ", ".join(f"{name} {up(value)}" for name, value in pairs))
    print(f"written: {folder / 'report.html'} and what it was made from")
    if plans[0].config.release:
        # A release's gradients are "any", under which the guarantee covers the last models.
        saved = f"Result.load({str(folder / 'result.npz')!r})"
        print(
            f"publish only: {saved}.params (the models) and {saved}.guarantees[0].statement()\n"
            f"keep private: {folder}, whose files hold metrics that no guarantee covers\n"
            f"keep private or delete: {folder}.checkpoint, whose states no guarantee covers\n"
            f"deleted: {folder}.key, the noise key; delete any copy of it"
        )
    return 0


def read_settings(settings: Section) -> tuple[list[plan_.Plan], Problem]:
    """The plans and the problem of settings.

    Args:
        settings: As `tomllib` reads them.

    Raises:
        ValueError: For a section or key that nothing reads, or values that parts refuse.
    """
    check_keys("", settings, SECTIONS.keys() | _PLAIN)
    check_sections(
        settings, ("rounds", "data", "network", "model", "protect", "sampler", "optimizer")
    )
    matrix, task, sites = _task(settings)
    parts = config_parts(settings, sites)
    designs = parts.pop("noise")
    if parts["release"] is True and (len(designs) > 1 or np.size(settings.get("seeds", 0)) > 1):
        raise ValueError("release is true; leave one [[noise]], and give seeds = [0]")
    # A baseline leaves the budget to the others. Where there are none, the budget is refused.
    with naming(part_titles(parts, *({"noise": design} for design in designs))):
        config = plan_.Config(noise=next(filter(None, designs), None), **parts)
        # The plans share all but their noise, so that results can be compared.
        configs = [config.using(design) for design in designs or [None]]
        return [plan_.make(point, matrix, counts=task.partition) for point in configs], task


def _task(settings: Section) -> tuple[np.ndarray, Problem, Sites]:
    """The mixing matrix, model and data over its agents, and the agents' names."""
    network = {"mixing": "metropolis", "seed": 0} | settings["network"]
    # A file of edges that cannot be read is named as a path.
    with naming({"path": "[network] graph"}):
        graph, matrix, _ = constructed("network", inputs.network, network)
    sites = nodes.labels(graph)
    data = {"partition": "iid", "seed": 0} | settings["data"]
    keys = {"name", "partition", "alpha", "seed", "test"}
    check_keys("[data] ", data, keys)
    with naming(titles_of("data", keys)):
        records = load.load(data.get("name"))
        # What has no effect is refused, so that nobody counts on it.
        unread = {}
        if data["partition"] != "dirichlet":
            unread["alpha"] = "partition is not 'dirichlet'"
        if records.x_test is not None:
            unread["test"] = f"{records.name} has its own test records"
        for name in unread.keys() & settings["data"]:
            raise ValueError(f"{name} is {data[name]!r}, and {unread[name]}; leave it out")
        _validate.integer("seed", data["seed"], minimum=0)
        _validate.one_of("partition", data["partition"], ("iid", "dirichlet", "owner"))
    source = records.name if records.name in catalog.SETS else records.source
    titles = titles_of("data", keys) | {
        "fraction": "[data] test", "owners": f"[data] owner of {source}",
        "n": "[network] graph", "labels": f"[network] graph {network['graph']}",
    }  # fmt: skip
    arrays = ("x", "y", "train x", "train y", "test x", "test y")
    titles |= {name: f"[data] {name} of {source}" for name in arrays}
    with naming(titles):
        train, test, shards = _dealt(data, records, source, sites)
    model = dict(settings["model"])
    options = {name: model.pop(name) for name in MODEL_OPTIONS & set(model)}
    loss = options.pop("loss", "cross_entropy")
    name = model.pop("name", "MLP")
    kind = (MODELS.get(name) if isinstance(name, str) else None) or _imported(name)
    for field in ("outputs", "classes"):
        if loss == "cross_entropy" and field in inspect.signature(kind).parameters:
            # Labels are data: that their number is public is said in the template.
            model.setdefault(field, int(max(train[1].max(), test[1].max())) + 1)
    titles |= titles_of("model", MODEL_OPTIONS) | {"model": "[model]"}
    try:
        # A class of the user's own may call its arguments what keys of other sections become.
        module = constructed("model", kind, model)
        with naming(titles):
            task = supervised(module, loss, train, test, shards, name=data["name"], **options)
    except ValueError:
        raise
    except Exception as error:  # A class of the user's own may raise anything.
        raise ValueError(
            f"[model] is {name!r}, which cannot be made ({_validate.said(error)}); mend it"
        ) from error
    return matrix, task, sites


def _dealt(
    data: Section, records: load.Dataset, source: str, sites: Sites
) -> tuple[Any, Any, partition.Partition]:
    """Training and test records, and the agents who hold the former."""
    seed = data["seed"]
    held_out = data.get("test", 0.2), seed
    # Held out before agents get their records: no agent sees a test record.
    train, test = split.with_test(records, *held_out)
    if records.x_test is None:
        count = _validate.counted(len(test[1]), "record")
        print(f"no test records in {data['name']}: {count} held out, by seed {seed}")
    if data["partition"] == "iid":
        shards = partition.iid(len(train[1]), len(sites), seed)
    elif data["partition"] == "owner":
        if records.owner is None:
            remedy = "add each training record's agent"
            raise ValueError(f"partition is 'owner', and {source} has no array owner; {remedy}")
        # Dealt as the labels are; the records need not be copied again.
        dealt = records._replace(x_train=records.owner, y_train=records.owner)
        owners = split.with_test(dealt, *held_out)[0][1]
        shards = partition.by_owner(owners, sites)
    else:
        shards = partition.dirichlet(train[1], len(sites), data.get("alpha", 0.5), seed)
    if nodes.have_names(sites):
        shards = shards._replace(names=sites)
    return train, test, shards


def _imported(name: str) -> type[nn.Module]:
    """A class of the user's own."""
    title = f"[model] name is {name!r}"
    # As entry points name a class: module:Class.
    module, colon, attribute = str(name).partition(":")
    if not colon:
        choice = _validate.choice(name, MODELS)
        raise ValueError(f"{title}; {choice}, or your own 'module:Class'")
    try:
        model = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"{title}, which cannot be imported: {_validate.said(error)}; put {module}.py beside "
            "the file of settings"
        ) from None
    if not (isinstance(model, type) and issubclass(model, nn.Module)):
        raise ValueError(f"{title}, a {type(model).__name__}; name a class of modules")
    return model
