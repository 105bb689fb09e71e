"""Execution: the only folder that trains. Everything here may import torch; nothing here imports `cost`."""
