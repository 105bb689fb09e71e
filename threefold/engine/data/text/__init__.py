"""From text to tokens: formats of files and records, tokenizers, chat templates, and writing a token shard."""
