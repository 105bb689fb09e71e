"""An export judged by Megatron's own validation, on a CPU and in Megatron's own interpreter."""
