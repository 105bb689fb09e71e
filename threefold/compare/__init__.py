"""Differences between plans, runs and traces, and the search for the setting behind a regression."""
