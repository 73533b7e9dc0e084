"""What test_two_processes.py runs in each process: python two_processes.py FOLDER."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

import defense_ddp
import monitor_ddp


def main(folder: Path) -> None:
    warnings.filterwarnings("ignore")
    rank = os.environ["RANK"]
    for name, case in monitor_ddp.CASES.items():
        found = case(folder / name, 2)
        (folder / f"{name}-{rank}.json").write_text(json.dumps(found))
    found = defense_ddp.defended(folder)
    (folder / f"defense-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
