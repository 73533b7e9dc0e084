"""Scores of weight updates after local training.

``surrogate`` finds the network at which an update looks like a gradient, ``client``
scores one client's samples there (each as if the others were known, and with ``joint``
all together), ``evaluate`` all clients; ``api`` is :func:`leakwatch.score_update`.
"""
