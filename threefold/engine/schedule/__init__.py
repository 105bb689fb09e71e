"""Which microbatch runs when: one after the other, through a pipeline, or overlapped with expert exchanges."""
