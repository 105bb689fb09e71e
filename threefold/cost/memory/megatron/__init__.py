"""Memory of a rank that runs Megatron Bridge: formulas calibrated by published runs."""
