"""What Megatron itself refuses, or accepts and then does otherwise: each rule with release and place."""
