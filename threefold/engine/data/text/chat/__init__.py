"""Conversations to tokens with a loss mask: Jinja templates of tokenizers, and ChatML where there is none."""
