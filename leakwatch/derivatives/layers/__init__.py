"""A network taken apart at its layers: their products, and the calls with a weight.

``products`` has the products of layers for rows with weights of their own, and the one
table of rules by type of layer; ``convolutions`` those of convolutions; ``modules``
finds the layers of a network for which there are rules. ``calls`` reads calls of torch
functions with a weight, ``taps`` sees a forward's calls, ``layout`` where samples of a
batch are in them, ``unfolding`` what a convolution's weight meets; ``bilinear`` takes
products with J and H from them.
"""
