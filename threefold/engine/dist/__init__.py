"""Process groups, collectives, rendezvous and consensus: the only modules that talk to torch.distributed."""
