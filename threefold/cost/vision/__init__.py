"""Image encoder and projector of vision-language models: their pictures, parameters and saved activations."""
