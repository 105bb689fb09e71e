"""Processes of a run, without torch: agent, heartbeats, watchdog, cores, scripts for Slurm and torchrun."""
