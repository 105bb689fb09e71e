"""What differs between families in their checkpoints: names of tensors, and keys of config.json."""
