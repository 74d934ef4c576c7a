"""Sphinx configuration: `python -m sphinx -W --keep-going -b html docs docs/_build/html`."""

import mpi4py

mpi4py.rc.initialize = False  # documentation needs the modules, not a running MPI

import mpiquant  # noqa: E402

project = "mpiquant"
author = "the mpiquant authors"
version = release = mpiquant.__version__
html_title = f"mpiquant {version}"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "examples"]
html_theme = "furo"
default_role = "code"  # docstrings write code in single backquotes

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# Signatures as they are written: MPI.SUM, not an object's address.
autodoc_preserve_defaults = True
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_google_docstring = False
napoleon_use_param = False
napoleon_use_rtype = False
add_module_names = False


def escape_stars(app, what, name, obj, options, lines):
    """Keep reStructuredText from reading the star of `(N, *x.shape)` as emphasis."""
    lines[:] = [line.replace("(N, *x", "(N, \\*x") for line in lines]


def setup(app):
    """Run before napoleon, whose priority is 500."""
    app.connect("autodoc-process-docstring", escape_stars, priority=400)
