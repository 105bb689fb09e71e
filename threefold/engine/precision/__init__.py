"""Products of matrices below sixteen bits: formats, recipes, and where they are used."""
