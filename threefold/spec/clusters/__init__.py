"""How clusters are run, and chips and clusters of the user's own, read from a file."""
