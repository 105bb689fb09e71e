"""Processes of a run: the agent that starts ranks, heartbeats, and the watchdog that reports hangs."""
