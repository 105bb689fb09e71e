"""From text to tokens: reading files, tokenizers, the chat template, and writing a token shard."""
