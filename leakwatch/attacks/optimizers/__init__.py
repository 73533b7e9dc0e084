"""First-order descent on pixels: optimisers, their state, the loop over steps."""
