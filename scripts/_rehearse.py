"""Run a script on a few random images in the place of any data set: _rehearse.py SCRIPT WORD ...

So that every command of the GPU queue can be tried where neither its data nor a GPU is.
"""

import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np

from dpjax.data import load

RECORDS, TESTED = 240, 40
# Smaller than the pictures are: the networks take any size.
SHAPES = {"mnist": (28, 28, 1)}
CLASSES = {"cifar100": 100}


def few(name: str, **options: Any) -> load.Dataset:
    """A data set of the name's shape and classes."""
    random = np.random.default_rng(0)
    shape = SHAPES.get(name, (16, 16, 3))
    x = random.integers(0, 256, (RECORDS + TESTED, *shape), dtype=np.uint8)
    y = np.arange(len(x), dtype=np.int32) % CLASSES.get(name, 10)
    train, test = slice(RECORDS), slice(RECORDS, None)
    return load.Dataset(name, x[train], y[train], x[test], y[test], "random", "", None)


def main(script: str, *words: str) -> None:
    """Run the script as ``python SCRIPT WORD ...`` does."""
    load.load = few
    sys.argv = [script, *words]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
