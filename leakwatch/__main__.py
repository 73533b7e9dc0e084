"""``python -m leakwatch``, where the script ``leakwatch`` is not on the path."""

from __future__ import annotations

import sys

from leakwatch.cli import main

if __name__ == "__main__":
    sys.exit(main())
