"""Plans for Megatron Bridge and Megatron-LM: written in the names of a release, and read back from them."""
