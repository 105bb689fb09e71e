"""Generation: a decoder that reads each token once, caches of its layers, and the choice of the next token."""
