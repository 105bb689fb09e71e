"""Finds the settings behind a regression between two plans by running a command on plans between them."""
