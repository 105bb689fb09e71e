"""Other formats: published runs and Megatron's names."""
