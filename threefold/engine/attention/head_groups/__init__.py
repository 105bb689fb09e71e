"""Attention over some heads at a time, where all heads of a long sequence at once take too much memory."""
