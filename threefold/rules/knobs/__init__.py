"""Rules about knobs: dispatchers, graphs, overlap, precision, recompute and offload."""
