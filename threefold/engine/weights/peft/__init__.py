"""LoRA adapters in the files of PEFT, and merged into the weights."""
