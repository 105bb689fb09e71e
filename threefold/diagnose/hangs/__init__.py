"""Hangs: flight recorder dumps of all ranks -> the collective whose members disagree, and who did not come."""
