"""Building blocks of the models: norms, rotary embedding, MLP, input projections, positions, cross entropy."""
