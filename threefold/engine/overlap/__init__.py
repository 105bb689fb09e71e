"""Expert exchanges hidden behind compute: the forward of one microbatch beside the backward of another."""
