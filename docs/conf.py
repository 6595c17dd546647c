"""Sphinx's settings: the pages of this folder and the API reference, as a site that can be read without a network."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from pkgutil import resolve_name

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.errors import ExtensionError

from rollbridge.version import __version__

sys.path.insert(0, str(Path(__file__).parents[1]))

project = "rollbridge"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
nitpick_ignore_regex = [
    ("py:.*", r"(collections\.abc|enum|confluent_kafka|concurrent\.futures)\..*|KafkaException|KafkaError"),
    ("py:.*", r"rollbridge\.model\.synchronizer\.[STU]"),  # variables of types
]
html_theme = "furo"
html_title = f"rollbridge {version}"
html_copy_source = False
html_show_copyright = False

# A reference in a page or docstring that leads nowhere is an error, as is everything else that Sphinx warns of.
nitpicky = True
myst_heading_anchors = 4
myst_enable_extensions = ["smartquotes"]

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # shown in no signature: what arguments are is said under Args
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

_REMOTE = re.compile(
    r"""<(?:script|img|iframe)\b[^>]*\bsrc="https?:|<link\b[^>]*\bhref="https?:|@import\s|url\(["']?https?:"""
)


def _check_offline(app: Sphinx, failure: Exception | None) -> None:
    """Fail if a page or style sheet would load anything over a network."""
    if failure is None:
        pages = [path for path in Path(app.outdir).rglob("*") if path.suffix in (".html", ".css")]
        remote = [path.name for path in pages if _REMOTE.search(path.read_text(encoding="utf-8"))]
        if remote:
            raise ExtensionError(f"pages that need a network: {', '.join(sorted(remote))}")


def _find(
    app: Sphinx, environment: BuildEnvironment, node: pending_xref, text: nodes.TextElement
) -> nodes.Element | None:
    """Find what a docstring names as it is seen in its own module; what exists, but is not public, needs no link."""
    if node.get("refdomain") != "py":
        return None
    name = node["reftarget"].rstrip(".").removeprefix("~")
    last, domain = name.rpartition(".")[2], environment.domains["py"]
    homes = "rollbridge.", "rollbridge.errors.", "rollbridge.consumer.records.", "rollbridge.consumer.fetched_ranges."
    for candidate in (f"rollbridge.{name}", *(home + last for home in homes)):
        found = domain.resolve_xref(environment, node["refdoc"], app.builder, "obj", candidate, node, text)
        if found is not None:
            return found
    try:
        resolve_name(name)
    except (AttributeError, ImportError, ValueError):
        return None
    return text


_raw: dict[str, list[str]] = {}
"""Docstrings of attributes before napoleon has seen them: it takes all before a colon for a type."""


def _keep(_: Sphinx, what: str, name: str, __: object, ___: object, lines: list[str]) -> None:
    if what in ("attribute", "property"):
        _raw[name] = list(lines)


def _put_back(_: Sphinx, what: str, name: str, __: object, ___: object, lines: list[str]) -> None:
    if what in ("attribute", "property"):
        lines[:] = _raw.pop(name)


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _keep, priority=400)  # napoleon's is 500
    app.connect("autodoc-process-docstring", _put_back, priority=600)
    app.connect("missing-reference", _find)
    app.connect("build-finished", _check_offline)
