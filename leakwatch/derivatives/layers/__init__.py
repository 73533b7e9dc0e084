"""A network taken apart at its calls with a weight: the layers and their products."""
