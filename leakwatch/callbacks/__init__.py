"""Callbacks for a Lightning Trainer."""

from leakwatch.callbacks.audit import InversionAudit
from leakwatch.callbacks.defense import GradientDefense
from leakwatch.callbacks.monitor import LeakageMonitor
from leakwatch.callbacks.observing import observing
from leakwatch.callbacks.update_audit import UpdateAudit

__all__ = [
    "GradientDefense",
    "InversionAudit",
    "LeakageMonitor",
    "UpdateAudit",
    "observing",
]
