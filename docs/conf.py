"""The site: python -m sphinx -W docs site."""

import importlib
import inspect
import pkgutil
import re
import sys
from pathlib import Path

import dpjax

sys.modules["dp"] = dpjax  # The top level has the names that users write.

project, author, copyright = "dpjax", "the dpjax authors", "the dpjax authors, Apache-2.0"
release = version = dpjax.__version__
extensions = ["myst_nb", "sphinx_copybutton"]
extensions += [f"sphinx.ext.{name}" for name in ("autodoc", "napoleon", "mathjax")]
exclude_patterns = ["records", "**.ipynb_checkpoints"]
html_theme, html_title = "sphinx_book_theme", f"dpjax {release}"
html_theme_options = {
    "show_toc_level": 2,
    "home_page_in_toc": True,
    "use_download_button": False,  # Sources are in the repository.
    "navbar_persistent": [],  # The sidebar has the search.
    "secondary_sidebar_items": {"**": ["page-toc.html"], "index": []},
}
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
        elsewhere = [each for each, of in values.items() if home(of, name) not in (name, None)]
        lines = [name, "=" * len(name), "", f".. automodule:: {name}"]
        lines += [f"   :exclude-members: {', '.join(elsewhere)}"] if elsewhere else []
        pages[f"{name}.rst"] = "\n".join([*lines, ""])
    for stale in set(folder.iterdir()) - {folder / name for name in pages}:
        # Of a module that is gone, or public no more.
        stale.unlink()
    for name, text in pages.items():
        page = folder / name
        if not page.exists() or page.read_text(encoding="utf-8") != text:
            page.write_text(text, encoding="utf-8")


def home(value, name: str) -> str | None:
    """The module whose page has a value of another module; None where no page has it."""
    module, own = getattr(value, "__module__", name), getattr(value, "__name__", "")
    if own in getattr(sys.modules.get(module), "__all__", ()):
        return module
    return "dp" if getattr(dpjax, own, None) is value else None


def index(names: list[str]) -> str:
    """The list of modules."""
    lines = [
        "# Reference",
        "",
        "Every public name, by module; [the top level](top.md) has those of `dp`.",
        "",
    ]
    lines += ["| module | what it holds |", "| --- | --- |"]
    for name in names:
        said = inspect.getdoc(importlib.import_module(name)).splitlines()[0].replace("|", "\\|")
        lines.append(f"| [{name}]({name}.rst) | {said} |")
    return "\n".join([*lines, "", "```{toctree}", ":hidden:", "", "top", *names, "```", ""])


def top() -> str:
    """The names of ``import dpjax as dp``."""
    head = "# dp: the top level\n\n`import dpjax as dp` has these names, and loads them late.\n"
    rows, pages = ["| name | is |", "| --- | --- |"], ["```{eval-rst}"]
    for name in dpjax.__all__:
        value = getattr(dpjax, name)
        if inspect.ismodule(value):
            link = f"[`dp.{name}`]({value.__name__}.rst)"
        elif callable(value):
            link = f"{{py:obj}}`dp.{name}`"
            kind = "class" if inspect.isclass(value) else "function"
            pages += [f".. auto{kind}:: dp.{name}", ""]
        else:
            continue
        rows.append(f"| {link} | {inspect.getdoc(value).splitlines()[0]} |")
    return "\n".join([head, *rows, "", *pages, "```", ""])


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
