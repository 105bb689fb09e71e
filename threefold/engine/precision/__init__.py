"""GEMMs below sixteen bits: number formats, quantization, recipes, backends, and the layers that use them."""
