"""A plan for fine-tuning a checkpoint on this machine: facts of the checkpoint and the data, and the settings."""
