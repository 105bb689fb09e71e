"""Which rank holds which weights, gradients and optimizer states: one rank, ZeRO-1 or FSDP."""
