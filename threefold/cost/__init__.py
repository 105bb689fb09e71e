"""Prediction: a plan in, bytes and seconds out, by named term. Pure functions without torch.

`estimate` is the entry. `memory/` answers how many bytes a rank holds, `traffic/` how many it sends, `time/` how long a
step takes. Memory and traffic have one model per stack (Megatron Bridge, our own engine).
"""
