"""Summaries, correlations and headlines of what the ledger holds."""
