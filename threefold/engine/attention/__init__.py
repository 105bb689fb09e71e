"""Mixers over positions: grouped-query, latent, gated delta rule; and the kernels behind them."""
