"""The fixed, reproducible set of samples that is watched over training."""

from leakwatch.probes.probe_set import ProbeSet

__all__ = ["ProbeSet"]
