"""The explorer: a page on this machine that shows how a plan changes with its degrees and knobs."""
