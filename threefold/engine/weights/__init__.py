"""Engine names <-> Hugging Face names; safetensors in and out, tensor by tensor."""
