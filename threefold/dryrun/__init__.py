"""Rehearsal: the engine on fake tensors and a fake process group, any rank of any layout."""
