"""The site: python -m sphinx -W docs site."""

import collections
import html
import importlib
import inspect
import json
import pkgutil
import re
import sys
import tomllib
from pathlib import Path

from docutils import nodes
from numpy.typing import ArrayLike
from sphinx import addnodes
from sphinx.domains.python import PyObject
from sphinx.search.en import SearchEnglish
from sphinx.util.typing import stringify_annotation

import dpjax

sys.modules["dp"] = dpjax  # The top level has the names that users write.

project, author, copyright = "dpjax", "the dpjax authors", "the dpjax authors, Apache-2.0"
release = version = dpjax.__version__
extensions = ["myst_nb", "sphinx_copybutton"]
extensions += [f"sphinx.ext.{name}" for name in ("autodoc", "napoleon", "mathjax", "viewcode")]
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
toc_object_entries_show_parents = "hide"  # The contents have classes above their methods.
# Pages that guide come before those of reference and evidence.
html_search_scorer = str(Path(__file__).parent / "_static" / "scorer.js")
# Prompts and printed lines stay where they are.
copybutton_prompt_text, copybutton_prompt_is_regexp = r">>> |\.\.\. ", True

# Tutorials are committed as they ran; scripts/test --all runs them again.
nb_execution_mode = "off"
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 4

default_role = "py:obj"
autodoc_member_order, autodoc_default_options = "groupwise", {"members": True}
autodoc_typehints, autodoc_typehints_description_target = "description", "documented"
autodoc_typehints_format, python_use_unqualified_type_names = "short", True
napoleon_numpy_docstring, napoleon_use_ivar, napoleon_attr_annotations = False, True, False
for field in PyObject.doc_field_types:
    if field.name == "variable":
        field.label = "Attributes"

KINDS = {
    "Use": (
        "accounting.guarantee", "algorithms.methods", "commands", "data", "engine.estimate",
        "engine.round", "engine.run", "learning", "models", "plans.noise", "plans.optimizers",
        "plans.plan", "plans.protect", "plans.samplers", "plans.scheduled", "plans.sums", "results",
        "topology",
    ),
    "Extend": (
        "accounting", "algorithms", "engine.host", "plans", "protocols", "secagg", "sites",
        "transforms",
    ),
    "Internals": ("encoding", "engine", "mechanism"),
    "Contrib": ("contrib",),
}  # fmt: skip
"""What modules are for; of two names of a module the longer counts."""
PURPOSES = {
    "Use": "From data to figures.",
    "Extend": "What a part of your own inherits, calls or is compared with.",
    "Internals": "What the package itself is built on.",
    "Contrib": "Mathematics and domain code of the experiments, without a promise of stability.",
}


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


def kind(name: str) -> str:
    """What a module is for."""
    prefixes = [(len(prefix), title) for title, parts in KINDS.items() for prefix in parts
                if f"{name}.".startswith(f"dpjax.{prefix}.")]  # fmt: skip
    return max(prefixes)[1]


def index(names: list[str]) -> str:
    """The list of modules, by what they are for."""
    lines = ["# Reference", ""]
    lines += ["Every public name, by module. [The top level](top.md) has those of `dp`.", ""]
    order = ["top"]
    for title, purpose in PURPOSES.items():
        lines += [f"## {title}", "", purpose, "", "| module | what it holds |", "| --- | --- |"]
        for name in names:
            if kind(name) == title:
                order.append(f"{name.removeprefix('dpjax.')} <{name}>")
                doc = inspect.getdoc(importlib.import_module(name))
                first = doc.splitlines()[0].replace("|", "\\|")
                lines.append(f"| [{name}]({name}.rst) | {first} |")
        lines.append("")
    return "\n".join([*lines, "```{toctree}", ":hidden:", "", *order, "```", ""])


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


SYNONYMS = tomllib.loads(Path(__file__).with_name("synonyms.toml").read_text(encoding="utf-8"))


def with_synonyms(app, doctree) -> None:
    """Enter what users type in the search into the index, where a page has other words."""
    words = SYNONYMS.get(app.env.docname, ())
    if words:
        section = next(doctree.findall(nodes.section))
        entries = [("single", word, section["ids"][0], "main", None) for word in words]
        section.insert(0, addnodes.index(entries=entries))


def write_word_counts(app, env) -> None:
    """How often every guide has every word, by which the search ranks them."""
    language, counts = SearchEnglish({}), {}
    for name in sorted(env.found_docs):
        if not name.startswith("reference/") and "nosearch" not in env.metadata[name]:
            words = language.split(env.get_doctree(name).astext().lower())
            stems = (language.stem(word) for word in words if language.word_filter(word))
            counts[name] = collections.Counter(stems)
    text = f"const wordCounts = {json.dumps(counts)};\n"
    (Path(app.srcdir) / "_static" / "word_counts.js").write_text(text, encoding="utf-8")


def with_word_counts(app, page, template, context, doctree) -> None:
    """Only the page of the search reads the counts."""
    if page == "search":
        app.add_js_file("word_counts.js")


def typeset(app, doctree) -> None:
    """Numbers keep their signs; cells of tables say whether they are short or long."""
    for text in list(doctree.findall(nodes.Text)):
        if isinstance(text.parent, (nodes.paragraph, nodes.emphasis, nodes.strong)):
            joined = re.sub(r"(?<=\d) (?=%)|(?<=±) | (?=±)", "\u00a0", text)
            text.parent.replace(text, nodes.Text(joined))
    for cell in doctree.findall(nodes.entry):
        size = len(cell.astext())
        is_head = isinstance(cell.parent.parent, nodes.thead)
        if size <= 13:
            cell["classes"].append("short")
        elif is_head or size > 24:
            cell["classes"].append("long")


def breakable(app, pagename, templatename, context, doctree) -> None:
    """Long names break behind a dot, a slash, a colon or an underscore."""

    def broken(match) -> str:
        opening, name = match["opening"], match["name"]
        # Code that fits a line of a phone moves to the next one as a whole.
        shortest = {"": 24, '<span class="pre">': 30}.get(opening, 16)
        if name is None or len(html.unescape(name)) < shortest:
            return match[0]
        return opening + re.sub(r"(?<=[\w):][./:_])(?=\w)", "<wbr>", name)

    kept = r"<(pre|script|style)\b.*?</\1>|<(span|div)[^>]*class=\"[^\"]*math.*?</\2>"
    opening = r"(?P<opening><h1>|<span class=\"(?:std std-doc|pre)\">|)"
    pattern = rf"{kept}|{opening}(?P<name>[^\s<>]+)|<[^>]+>"
    context["body"] = re.sub(pattern, broken, context.get("body", ""), flags=re.DOTALL)


ARRAY = stringify_annotation(ArrayLike, "smart")


def short_types(app, what, name, value, options, signature, returned) -> None:
    """Arrays have one name in place of all that can be one."""
    types = app.env.temp_data.get("annotations", {}).get(name, {})
    for argument, text in types.items():
        types[argument] = text.replace(ARRAY, "~numpy.typing.ArrayLike")


def plain(app, what, name, obj, options, lines) -> None:
    """Docstrings are plain text but for backticks: stars, bars and underscores are themselves.

    An indented block behind a paragraph is printed as it is written: formulas and small tables.
    """
    if what in ("attribute", "data", "property") and lines:
        lines[0] = f": {lines[0]}"  # What stands before a colon is no type.
    written: list[str] = []
    before = ""
    is_block = False
    for line in lines:
        if line and not line.startswith(" "):
            is_block = False
        elif line and not written[-1] and re.match(r"\S+ .*[^:]:?$", before):
            is_block = True
            written += [".. code-block:: text", ""]
        before = line or before
        if not is_block and not line.lstrip().startswith((">>>", "...")):
            parts = re.split(r"(`+[^`]*`+)", line)
            parts[::2] = [
                re.sub(r"([*|])|(?<=\w)(_)(?!\w)", r"\\\1\2", part) for part in parts[::2]
            ]
            line = "".join(parts)
        written.append(line)
    lines[:] = written


def without_numbers(app, what, name, value, skip, options) -> bool | None:
    """Leave out fields that say only their number: their class describes them."""
    return (getattr(value, "__doc__", None) or "").startswith("Alias for field number") or None


def setup(app) -> None:
    """Write the reference before pages are read."""
    app.connect("builder-inited", write_reference)
    app.connect("source-read", without_records)
    app.connect("doctree-read", with_synonyms)
    app.connect("env-updated", write_word_counts)
    app.connect("html-page-context", with_word_counts)
    app.connect("doctree-read", typeset)
    app.connect("html-page-context", breakable)
    app.connect("autodoc-process-docstring", plain, priority=100)
    app.connect("autodoc-skip-member", without_numbers)
    app.connect("autodoc-process-signature", short_types, priority=600)
