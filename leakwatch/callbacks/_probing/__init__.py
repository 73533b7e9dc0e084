"""When and how probes are measured in training; private to the callbacks."""
