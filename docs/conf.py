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

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# Signatures as they are written: MPI.SUM, not an object's address.
autodoc_preserve_defaults = True
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_google_docstring = False
napoleon_use_rtype = False
add_module_names = False
