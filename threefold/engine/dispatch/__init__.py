"""Token dispatchers: they carry tokens to the experts and back. One transport a file, one protocol (`protocol.py`)."""
