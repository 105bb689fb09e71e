"""Drawn scenes with captions and questions: the data of `job.data = "scenes"`."""
