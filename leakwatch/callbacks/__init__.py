"""Callbacks for a Lightning Trainer."""

from leakwatch.callbacks.audit import InversionAudit
from leakwatch.callbacks.defense import GradientDefense
from leakwatch.callbacks.monitor import LeakageMonitor
from leakwatch.callbacks.observing import observing

__all__ = ["GradientDefense", "InversionAudit", "LeakageMonitor", "observing"]
