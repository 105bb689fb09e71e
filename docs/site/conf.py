"""Settings of the site (Sphinx with MyST's Markdown). `build.py` beside it copies the pages and calls Sphinx."""

import threefold

project = "Threefold"
release = version = threefold.__version__
extensions = ["myst_parser"]
root_doc = "README"
source_suffix = {".md": "markdown"}
exclude_patterns = ["demo.sh", "site"]
myst_heading_anchors = 3  # links to headings, as on GitHub
html_theme = "furo"
html_title = f"Threefold {release}"
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False
# The pages name files of the repository, and code of languages that Pygments does not know is shown as it is.
suppress_warnings = ["misc.highlighting_failure"]
