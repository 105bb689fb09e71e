"""Threefold: plan, check, rehearse, train, profile and retune Mixture-of-Experts models."""

__version__ = "0.1.0"
