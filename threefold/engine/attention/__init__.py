"""Sequence mixers (grouped-query attention, MLA, the gated delta rule) and the attention kernels behind them."""
