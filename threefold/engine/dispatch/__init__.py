"""Token dispatchers carry tokens to the experts and back: one transport per file, one protocol (`protocol.py`)."""
