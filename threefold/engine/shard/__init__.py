"""Sharding of a model over ranks: one file for each axis (TP, CP, EP); `order.py` applies them in one visible order."""
