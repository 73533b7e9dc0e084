"""The distance between two gradients, and its derivative in the images."""
