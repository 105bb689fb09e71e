"""Ranks and the weights, gradients and optimizer states: one rank, ZeRO-1 or FSDP."""
