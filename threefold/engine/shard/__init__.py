"""How a model is cut over ranks: placements, collectives, and one file an axis; order.py applies them."""
