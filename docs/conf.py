"""Sphinx configuration. `make docs` builds the site in docs/_build/html, without network access."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from _sphinx import docstrings, names, tasks

import fnet
import fnet.training

for name in (
    "datasets",
    "flags",
    "plots",
):  # attributes of the package, which autodoc would otherwise not import
    sys.modules[f"fnet.training.{name}"] = getattr(fnet.training, name)

project = "fnet"
author = "The fnet authors"
copyright = "2026, the fnet authors"
version = release = fnet.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build", "_sphinx", "api/generated/*.md"]
root_doc = "index"
nitpicky = False  # annotations name types of JAX and Optax, whose pages need network access
suppress_warnings = ["config.cache", "autosummary.import_cycle", "ref.python"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signature has them; Args describes shapes and meaning
autodoc_preserve_defaults = True
autosummary_generate = True
autosummary_filename_map = names.file_names()
templates_path = ["_sphinx/templates"]
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_param = False  # so that "a, b: ..." stays one entry
napoleon_custom_sections = [
    *((name, "params_style") for name in ("Attributes", "Inputs", "Fields")),
    ("Others", "notes_style"),
]
default_role = "py:obj"
pygments_style = "default"

html_theme = "pydata_sphinx_theme"
html_title = "fnet"
html_static_path = ["_static"]
html_css_files = ["fnet.css"]
html_show_sourcelink = False
html_copy_source = False
html_sidebars = {"coming_from/*": []}  # room for two columns of code
html_theme_options = {
    "show_prev_next": True,
    "navigation_with_keys": False,
    "navbar_align": "left",
    "header_links_before_dropdown": 6,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "show_toc_level": 2,
    "logo": {"text": "fnet"},
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def setup(app):
    app.connect("autodoc-process-docstring", docstrings.process, priority=400)  # before napoleon
    app.connect("autodoc-skip-member", docstrings.skip)
    app.connect("autodoc-process-signature", docstrings.signature)
    app.connect("source-read", tasks.insert)
