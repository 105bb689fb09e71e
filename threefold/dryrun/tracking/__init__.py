"""Records of a rehearsal: live bytes by module and memory term, and the collectives of a step."""
