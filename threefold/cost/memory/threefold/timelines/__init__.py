"""The tensors of one module in the order in which our own engine makes and frees them."""
