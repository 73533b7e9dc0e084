"""Callbacks for a Lightning Trainer."""

from leakwatch.callbacks._probing.observing import observing
from leakwatch.callbacks.gradient_defense import GradientDefense
from leakwatch.callbacks.inversion_audit import InversionAudit
from leakwatch.callbacks.leakage_monitor import LeakageMonitor
from leakwatch.callbacks.update_audit import UpdateAudit

__all__ = [
    "GradientDefense",
    "InversionAudit",
    "LeakageMonitor",
    "UpdateAudit",
    "observing",
]
