"""How an audit is planned, run and judged; private to the callbacks."""
