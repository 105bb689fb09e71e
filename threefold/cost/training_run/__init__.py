"""What a whole training takes: time, energy, money, checkpoints, and what failures leave of it."""
