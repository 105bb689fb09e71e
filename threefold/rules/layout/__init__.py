"""Rules about degrees, batches and sequences: what must divide, and which axis to use for what."""
