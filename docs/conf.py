"""Sphinx's configuration: `make docs` writes the site into docs/_build/html.

Pages are MyST Markdown. The reference is made of Google-style docstrings (napoleon), types and
defaults of the signatures. Neither the build nor the site needs a network: `check_assets` refuses a
page that would load a file from another site.
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
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # a field that autodoc also lists keeps one entry
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
nitpick_ignore_regex = [
    ("py:.*", r"(torch|numpy|np|dist|collections|pathlib|types|megatron|advice|cost)\..*"),
    ("py:class", r".* .*"),  # notes of `Annotated`, which are no names
]
default_role = "code"
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints = "both"  # in the signature, and at each parameter that the docstring describes
autodoc_typehints_description_target = "documented_params"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True

# A parameter in the field list that napoleon makes of a section `Args:`.
PARAMETER = re.compile(r":param (\w+): ")
UNPACKED = re.compile(r"\*\*options: [\w.~]*Unpack\[[^\]]*\]")
# What a browser fetches by itself; links for readers (<a href=...>) may lead anywhere.
LOADED = re.compile(r"""(?:<link[^>]+href=|\bsrc=|@import |url\()["']?(?:https?:)?//[^"'\s>)]+""")


def show_defaults(
    app: Any, what: str, name: str, documented: Any, options: Any, lines: list[str]
) -> None:
    """Append the default of each described parameter to its entry, unless the text has it."""
    if not callable(documented):
        return
    try:
        parameters = inspect.signature(documented).parameters
    except ValueError:  # some classes of the standard library's enum have no signature
        return
    for number, line in enumerate(lines):
        parameter = PARAMETER.match(line)
        if not parameter or parameter[1] not in parameters:
            continue
        default = parameters[parameter[1]].default
        last = number
        while last + 1 < len(lines) and lines[last + 1].startswith("  "):
            last += 1
        text = " ".join(lines[number : last + 1])
        if default not in (inspect.Parameter.empty, None) and "efault" not in text:
            lines[last] += f" Default: ``{_shown(default)}``."


def _shown(default: Any) -> str:
    """A default as a reader would write it."""
    return getattr(default, "__name__", None) or repr(default)


def choices_in_signature(
    app: Any,
    what: str,
    name: str,
    documented: Any,
    options: Any,
    shown: str | None,
    back: str | None,
) -> tuple[str | None, str | None] | None:
    """Show options as keywords with their types and defaults."""
    if documented is BurstConfig:
        return f"({_defaults(BurstConfig)})", back
    if shown and "AttentionKeywords" in shown:
        return UNPACKED.sub(_defaults(AttentionOptions), shown), back
    return None


def _defaults(choices: Any) -> str:
    return ", ".join(
        f"{field.name}: {_short(field.type)} = {field.default!r}"
        for field in dataclasses.fields(choices)
    )


def _short(annotation: Any) -> str:
    """A type without the notes of `Annotated`."""
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "Any")
    return text.removeprefix("Annotated[").split(",")[0] if "Annotated[" in text else text


def link_type(app: Any, env: Any, node: Any, shown: Any) -> Any:
    """Link a type in a signature by its public name; types without a public name stay text.

    A type without a module is one that its module imports for type checkers only.
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
    """Replace the mark `<!-- flags -->` on a page by the table of flags."""
    source[0] = source[0].replace("<!-- flags -->", flags.table())


def setup(app: Any) -> None:
    """Connect the functions of this file to Sphinx's events."""
    app.connect("source-read", table_of_flags)
    app.connect("autodoc-process-docstring", show_defaults, priority=900)  # after napoleon
    app.connect("autodoc-process-signature", choices_in_signature)
    app.connect("missing-reference", link_type)
    app.connect("build-finished", check_assets)
