"""What a whole training takes, told."""
