"""Callbacks for a Lightning Trainer: what users add to it, and extend.

What they are made of is in the private packages beside them: ``_probing`` (samples that
are watched), ``_audit`` (attacks), ``_defense`` (steps of training), ``_recording``
(ledger, loggers, report).
"""

from leakwatch.callbacks._probing.observing import observing
from leakwatch.callbacks.gradient_defense import GradientDefense
from leakwatch.callbacks.inversion_audit import InversionAudit
from leakwatch.callbacks.leakage_gate import GateError, LeakageGate
from leakwatch.callbacks.leakage_monitor import LeakageMonitor
from leakwatch.callbacks.update_audit import UpdateAudit

__all__ = [
    "GateError",
    "GradientDefense",
    "InversionAudit",
    "LeakageGate",
    "LeakageMonitor",
    "UpdateAudit",
    "observing",
]
