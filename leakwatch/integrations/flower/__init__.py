"""leakwatch in Flower: what updates give away, before they leave and after they arrive.

``mod`` is the client's part, ``strategy`` the server's; ``weights`` reads what Flower's
messages carry, ``recording`` writes one round into a ledger.
"""

from __future__ import annotations

try:
    import flwr as _flwr  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "leakwatch.integrations.flower needs Flower, which is not installed; install "
        "it with: pip install 'lightning-leakwatch[flower]'",
        name="flwr",
    ) from error

from leakwatch.integrations.flower.mod import LeakageMod
from leakwatch.integrations.flower.strategy import AuditingStrategy

__all__ = ["AuditingStrategy", "LeakageMod"]
