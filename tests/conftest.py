"""One thread for all tests: their tensors are tiny, and two threads only wait."""

from __future__ import annotations

import os

# Before torch is imported, and inherited by the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
