"""Labels read off a shared gradient, exactly where that is possible.

- `infer`: the published rules, for single samples and batches; `counts`: how often each
  class occurs in a batch.
- `last_layer`: the linear layer that makes the logits, in whose gradient the labels
  stand, and the slopes of the logits with them.
"""
