"""The distance between two gradients, and its derivative in the images.

``objective`` says what is matched and evaluates it, with ``distances`` and ``priors``.
``engines`` form gradients of many attacks one by one or by ``vmap``, ``layerwise`` by
the network's layers, for attacks on gradients and on updates alike; ``selection`` finds
which of them is right for a network, and fast.
"""
