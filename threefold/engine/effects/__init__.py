"""Effects of a plan's settings in a run: effects of knobs, bytes and seconds of recompute, slow ranks."""
