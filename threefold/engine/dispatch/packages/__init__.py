"""The optional packages behind the flex dispatchers: which one is installed, and how its buffers are called."""
