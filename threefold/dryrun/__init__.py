"""Rehearsal (`threefold dry-run`): the engine on meta tensors and a fake process group, for any rank of any layout."""
