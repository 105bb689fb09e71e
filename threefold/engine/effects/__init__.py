"""What the settings of a plan did in a run: effects of knobs, bytes and seconds of recompute, slow ranks."""
