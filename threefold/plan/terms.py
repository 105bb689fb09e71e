"""Names of the parts of a rank's memory, shared by the estimate and the rehearsal so that they can be compared."""

MEMORY_TERMS = (
    "weights",
    "gradients",
    "optimizer",
    "quantized_weights",
    "norms",
    "attention",
    "mlp",
    "router",
    "dispatch",
    "experts",
    "shared_experts",
    "embedding",
    "logits",
    "vision",
    "recompute",
    "overlap",
    "graphs",
    "workspace",
)
# What the device holds besides the allocator's tensors. Attention that is captured in graphs lies in their own pools.
RESERVE_TERMS = ("attention_in_graphs", "slack", "context", "communication")
