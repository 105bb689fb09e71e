"""How a run begins: weights of another run, the lineage in its contract, and what a failed start leaves behind."""
