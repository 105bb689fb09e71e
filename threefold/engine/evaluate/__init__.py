"""Measures a trained model on data: loss, perplexity, bits per byte, and multiple choice."""
