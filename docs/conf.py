"""The site: python -m sphinx -W docs site."""

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import dpjax

project, author, copyright = "dpjax", "the dpjax authors", "the dpjax authors, Apache-2.0"
release = version = dpjax.__version__
extensions = ["myst_nb", "sphinx_copybutton"]
extensions += [f"sphinx.ext.{name}" for name in ("autodoc", "napoleon", "mathjax")]
exclude_patterns = ["records", "**.ipynb_checkpoints"]
html_theme, html_title = "sphinx_book_theme", "dpjax"
html_theme_options = {"show_toc_level": 2, "home_page_in_toc": True}
html_css_files, html_static_path = ["dpjax.css"], ["_static"]
html_copy_source = False

# Tutorials are committed as they ran; scripts/test --all runs them again.
nb_execution_mode = "off"
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 4

default_role = "py:obj"
autodoc_member_order, autodoc_typehints = "groupwise", "none"
autodoc_default_options = {"members": True, "show-inheritance": False}
napoleon_numpy_docstring, napoleon_use_ivar, napoleon_attr_annotations = False, True, False


def public() -> list[str]:
    """Modules with public names."""
    found = []
    for module in pkgutil.walk_packages(dpjax.__path__, "dpjax."):
        if not any(part.startswith("_") for part in module.name.split(".")):
            if getattr(importlib.import_module(module.name), "__all__", None):
                found.append(module.name)
    return found


def write_reference(app) -> None:
    """A page a module, and their list."""
    folder = Path(app.srcdir) / "reference"
    folder.mkdir(exist_ok=True)
    names = public()
    pages = {"index.md": index(names), "top.md": top()}
    for name in names:
        module = importlib.import_module(name)
        values = {each: getattr(module, each) for each in module.__all__}
        # What another page has.
        elsewhere = [each for each, of in values.items() if getattr(of, "__module__", name) != name]
        lines = [name, "=" * len(name), "", f".. automodule:: {name}"]
        lines += [f"   :exclude-members: {', '.join(elsewhere)}"] if elsewhere else []
        pages[f"{name}.rst"] = "\n".join([*lines, ""])
    for name, text in pages.items():
        page = folder / name
        if not page.exists() or page.read_text() != text:
            page.write_text(text)


def index(names: list[str]) -> str:
    """The list of modules."""
    lines = [
        "# Reference",
        "",
        "Every public name, by module; [the top level](top.md) is `dp`.",
        "",
    ]
    lines += ["| module | what it holds |", "| --- | --- |"]
    for name in names:
        said = inspect.getdoc(importlib.import_module(name)).splitlines()[0].replace("|", "\\|")
        lines.append(f"| [{name}]({name}.rst) | {said} |")
    return "\n".join([*lines, "", "```{toctree}", ":hidden:", "", "top", *names, "```", ""])


def top() -> str:
    """The names of ``import dpjax as dp``."""
    lines = [
        "# dp: the top level",
        "",
        "`import dpjax as dp` has these names, and loads them late.",
        "",
    ]
    lines += ["| name | is | |", "| --- | --- | --- |"]
    for name in dpjax.__all__:
        value = getattr(dpjax, name)
        if inspect.ismodule(value):
            where = f"[{value.__name__}]({value.__name__}.rst)"
        elif callable(value):
            full = f"{value.__module__}.{value.__qualname__}"
            where = f"{{py:obj}}`{full}`"
        else:
            continue
        lines.append(f"| `dp.{name}` | {where} | {inspect.getdoc(value).splitlines()[0]} |")
    return "\n".join([*lines, ""])


def without_records(app, name, source) -> None:
    """Records stay in the repository: the site names them."""
    source[0] = re.sub(r"\[[^\]]*\]\(((?:\.\./\w+/)?records/[^)]*)\)", r"`\1`", source[0])


def plain(app, what, name, obj, options, lines) -> None:
    """Docstrings are plain text but for backticks: stars, bars and underscores are themselves."""
    for number, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...")):
            parts = re.split(r"(`+[^`]*`+)", line)
            parts[::2] = [
                re.sub(r"([*|])|(?<=\w)(_)(?!\w)", r"\\\1\2", part) for part in parts[::2]
            ]
            lines[number] = "".join(parts)


def setup(app) -> None:
    """Write the reference before pages are read."""
    app.connect("builder-inited", write_reference)
    app.connect("source-read", without_records)
    app.connect("autodoc-process-docstring", plain, priority=100)
