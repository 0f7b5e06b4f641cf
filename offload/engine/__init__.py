"""Training a model whose states are paged: what `offload.initialize` builds."""
