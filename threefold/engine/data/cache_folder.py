"""The folder for files that can be made again, used by `embedded_corpus.py` and `token_cache.py`.

It holds the embedded corpus, and shards made from text and records.
"""

import os
from pathlib import Path


def cache_folder(folder: str | Path | None = None) -> Path:
    """The given folder, or `threefold` in the user's cache (XDG_CACHE_HOME, else ~/.cache)."""
    if folder is not None:
        return Path(folder)
    home = os.environ.get("XDG_CACHE_HOME", "")
    # By the XDG specification a relative path is invalid and is ignored.
    return (Path(home) if home.startswith("/") else Path("~/.cache").expanduser()) / "threefold"
