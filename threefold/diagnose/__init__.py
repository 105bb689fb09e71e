"""Symptoms: what a dead, slow or full job left behind -> what happened, how sure that is, and what to do."""
