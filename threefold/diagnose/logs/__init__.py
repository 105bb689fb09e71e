"""Logs of Megatron-LM, Megatron Bridge, torchtitan and the threefold engine, read as a stream in bounded memory."""
