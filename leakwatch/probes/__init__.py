"""The fixed, reproducible set of samples that is watched over training.

``selection`` draws them from a data set, ``items`` reads them, ``dataset_state`` undoes
what reading did to the data set, ``samplers`` says which items training sees,
``pipeline`` asks the data set for its normalisation and class names, ``scale`` finds
pixel units and prior.
"""

from leakwatch.probes.probe_set import ProbeSet

__all__ = ["ProbeSet"]
