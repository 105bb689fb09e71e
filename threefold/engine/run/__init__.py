"""A run's folder: plan, contract, metrics, lock, random state and checkpoints; and progress on the terminal."""
