"""Forked ranks for tests."""

from threefold.engine.ranks import run_ranks

__all__ = ["run_ranks"]
