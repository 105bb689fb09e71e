"""What a step sends, as each stack does it."""
