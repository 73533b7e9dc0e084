"""Plotly figures, the same for the report and for Weights & Biases.

Each function takes rows or a table and returns a figure, or None when there is
nothing to draw.

- ``risk``: quantities and time over training.
- ``classes``: the latest probe by class.
- ``class_heat``: classes over training, or in several runs.
- ``runs``: several runs beside each other.
- ``layers``: shares of layers over training.
- ``spectrum``: eigenvalues by rank, and their distribution.
- ``attacks``: what attacks achieved, and what was predicted.
- ``levels``: lines at a PSNR that means something, and their names.
- ``style``: what all of them share.
"""
