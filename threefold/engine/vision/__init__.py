"""The image encoder and projector of vision-language models, and the positions of their tokens."""
