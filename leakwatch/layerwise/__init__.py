"""J of a batch and H = JᵀJ of a sample, formed layer by layer where a layer allows it.

:mod:`~leakwatch.layerwise.gram` and :mod:`~leakwatch.layerwise.batches` are what others
use; below them a network is taken apart at its calls with a weight.
"""
