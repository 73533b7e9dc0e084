"""What becomes of measured values: ledger, loggers, console; private."""
