"""Stand-ins for the GPUs, packages and ranks that a rehearsal does not have."""
