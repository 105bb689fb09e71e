"""Weights in and out: engine names and Hugging Face names, safetensors, import and export, tensor by tensor."""
