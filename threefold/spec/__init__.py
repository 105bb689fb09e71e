"""Facts, each with a source: models, chips, software stacks."""
