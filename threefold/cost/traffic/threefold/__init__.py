"""The collectives that our own engine calls in a training step, exact to the byte."""
