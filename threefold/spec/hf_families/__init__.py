"""Families of Mixture-of-Experts models as data: defaults of their configurations, and readers."""
