"""Sparse latent attention (DeepSeek-V3.2, GLM-5): an indexer chooses the keys that each query reads."""
