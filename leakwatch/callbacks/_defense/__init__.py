"""How a defense changes the gradients of a training step; private to the callbacks."""
