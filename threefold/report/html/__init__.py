"""Pages for a browser: one file each, with drawings inside, that need no network."""
