"""Sphinx's configuration: Markdown pages by MyST, the API reference from the docstrings, no network.

Built by ``make docs``, which fails on every warning: a broken link, a name that is nowhere, a page in no table.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pygments.lexers.special import TextLexer
from sphinx.highlighting import lexers

import shardops

lexers["mermaid"] = TextLexer()  # diagrams are for readers of the repository; here they are shown as they are written

project = "shardops"
copyright = "the shardops authors"
release = version = shardops.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = "shardops"

# Signatures as written; what they name of torch and typing is not in these pages.
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": False}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(torch|typing|collections|numpy|nn|argparse|os|pathlib)(\..*)?"),
    ("py:.*", r"(Tensor|DTensor|ProcessGroup|Path|Any|Callable|Iterable|Sequence|Mapping|ParamsT?)"),
    ("py:.*", r"(optional|Model|Work|dtype)"),
    ("py:.*", r"shardops\.(optim|integrations|plan|shadow|ops\._|collectives|casting|report)\..*"),
    ("py:class", r"dict\[str"),  # a field's type, cut at its comma
]
