"""LoRA: low-rank adapters beside frozen weights."""
