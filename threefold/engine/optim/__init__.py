"""Optimizers (AdamW, Muon), their CPU offload, and learning-rate schedules."""
