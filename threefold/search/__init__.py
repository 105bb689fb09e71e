"""Choice: enumerate plans that a draft leaves open, prune, rank, and say why."""
