"""Sphinx's configuration: `make docs` writes the site into docs/_build/html.

Pages are MyST Markdown; the reference is read from docstrings, which write `names` as the pages
do. Neither the build nor the site needs a network: `check_assets` refuses a page that would load
something from elsewhere.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

from sphinx.errors import SphinxError
from sphinx.util.nodes import make_refnode

import megatron_burst
from megatron_burst import flags
from megatron_burst.config import BurstConfig
from megatron_burst.options import AttentionOptions

project = "megatron_burst"
release = version = megatron_burst.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
napoleon_use_ivar = True  # fields that autodoc lists have one entry
smartquotes = False  # two hyphens of a flag are not a dash
highlight_language = "sh"  # of indented blocks; Python is fenced
exclude_patterns = ["_build", "cluster-here*"]  # what `make bench-cluster` measures stays out
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"{project} {release}"
html_copy_source = False
html_static_path = ["static"]
html_css_files = ["pictures.css"]
html_show_copyright = False

nitpicky = True
# No inventory of other packages is fetched, so their names stay text.
nitpick_ignore_regex = [("py:.*", r"(torch|numpy|np|dist|collections|pathlib|types|megatron)\..*")]
default_role = "code"
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True

# "name: what it is", "one, other: what they are" at the beginning of a line of a docstring.
ITEM = re.compile(r"(\w+(?:, \w+)*): ")
UNPACKED = re.compile(r"\*\*options: [\w.~]*Unpack\[[^\]]*\]")
# What a browser fetches by itself; links for readers (<a href=...>) may lead anywhere.
LOADED = re.compile(r"""(?:<link[^>]+href=|\bsrc=|@import |url\()["']?(?:https?:)?//[^"'\s>)]+""")


def list_parameters(
    app: Any, what: str, name: str, documented: Any, options: Any, lines: list[str]
) -> None:
    """Make a list of the parameters that a docstring describes, each at the beginning of a line."""
    if not callable(documented):
        return
    try:
        parameters = set(inspect.signature(documented).parameters)
    except ValueError:  # some classes of the standard library's enum have none
        return
    made: list[str] = []
    inside = False
    for line in lines:
        item = ITEM.match(line)
        if item and set(item[1].split(", ")) <= parameters:
            if not inside:
                made.append("")
            made.append(f"* **{item[1]}**: {line[item.end() :]}")
            inside = True
        elif inside and line.strip():
            made.append(f"  {line.strip()}")
        else:
            inside = False
            made.append(line)
    lines[:] = made


def choices_in_signature(
    app: Any,
    what: str,
    name: str,
    documented: Any,
    options: Any,
    shown: str | None,
    back: str | None,
) -> tuple[str | None, str | None] | None:
    """Show choices as keywords with their defaults; docstrings list the names they may have."""
    if documented is BurstConfig:
        return f"({_defaults(BurstConfig)})", back
    if shown and "AttentionKeywords" in shown:
        return UNPACKED.sub(_defaults(AttentionOptions), shown), back
    return None


def _defaults(choices: Any) -> str:
    return ", ".join(f"{field.name}={field.default!r}" for field in dataclasses.fields(choices))


def link_type(app: Any, env: Any, node: Any, shown: Any) -> Any:
    """Link a type in a signature by its public name; those of inner modules stay text.

    A name without a module is one that its module imports for type checkers only.
    """
    target = node.get("reftarget", "")
    ours = target.startswith("megatron_burst.") or "." not in target
    if node.get("refdomain") != "py" or not ours:
        return None
    domain, last = env.get_domain("py"), target.rpartition(".")[2]
    for name, entry in domain.objects.items():
        if name.rpartition(".")[2] == last and name.startswith("megatron_burst."):
            return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, shown)
    return shown


def check_assets(app: Any, failed: Exception | None) -> None:
    """Raise if a written page would load a script, style sheet, font or picture from elsewhere."""
    if failed:
        return
    for page in Path(app.outdir).rglob("*"):
        if page.suffix in {".html", ".css"}:
            found = LOADED.search(page.read_text(encoding="utf-8"))
            if found:
                raise SphinxError(f"{page.name} loads from elsewhere: {found[0]}")


def table_of_flags(app: Any, page: str, source: list[str]) -> None:
    """Write the flags of today where a page has the mark `<!-- flags -->`."""
    source[0] = source[0].replace("<!-- flags -->", flags.table())


def setup(app: Any) -> None:
    """Sphinx calls it."""
    app.connect("source-read", table_of_flags)
    app.connect("autodoc-process-docstring", list_parameters)
    app.connect("autodoc-process-signature", choices_in_signature)
    app.connect("missing-reference", link_type)
    app.connect("build-finished", check_assets)
