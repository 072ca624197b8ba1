"""The site: `make site`. Its pages are in docs/ and chapters/ (the book), its directives in bookext/."""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "site")]

from bookext.quotes import ALONE, FOLDERS  # noqa: E402

from minivllm import __version__  # noqa: E402

project = "minivllm"
author = "the authors of minivllm"
version = release = __version__
extensions = ["myst_parser", "bookext"]
root_doc = "chapters/index"  # extra/index.html leads there
include_patterns = [*ALONE, *(f"{folder}/**.md" for folder in FOLDERS)]
# The pages' folder is the repository, so that a link leads to the same page here and where files are read as they are.
exclude_patterns = [path.name for path in ROOT.iterdir() if path.name not in {*FOLDERS, *ALONE}]
myst_enable_extensions = ["colon_fence", "attrs_block", "deflist"]
myst_heading_anchors = 3
nitpicky = True
smartquotes_action = "qe"  # "--set" stays two hyphens
html_theme = "furo"
html_title = "minivllm"
html_static_path = ["static"]
html_extra_path = ["extra"]
html_css_files = ["book.css", "widgets.css"]
html_js_files = [("widgets.js", {"defer": "defer"})]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_use_index = False
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
# Arrow keys scroll wide code and figures. As the theme's shortcut they would lead to another page from there.
html_theme_options = {"navigation_with_keys": False}
