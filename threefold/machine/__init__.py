"""This machine: what is installed and runs here, and whether a plan can run on it. Imports no torch itself."""
