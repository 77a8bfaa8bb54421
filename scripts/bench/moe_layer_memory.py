"""Memory of Megatron-LM's benchmark of one mixture-of-experts layer, projected and measured.

    python scripts/bench/moe_layer_memory.py CASES.yaml [WORD ...]

CASES.yaml: a list of cases with ``model``, ``parallelism``, ``precision``, ``dispatcher`` and
``measured.max_allocated_gib``, on one host of 8 H100.  Words: only cases whose id has one.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from primus_ext.frameworks.published import moe_layer
from primus_ext.runner import child, emulation

GIB = 2**30


def recorded(row: dict[str, Any]) -> dict[str, Any]:
    """What one iteration of a case does: ``peak_bytes``, ``ops``, ``groups``, ``forward``, ...

    Raises:
        child.ChildError: the framework or the product refuses it.
    """
    with tempfile.TemporaryDirectory(prefix="primus_ext_") as name:
        folder = Path(name)
        question = {
            "module": moe_layer.MODULE,
            "args": [json.dumps(moe_layer.case(row))],
            "cwd": name,
            "routing": moe_layer.routing(row),
            **emulation.question(emulation.load_cluster("h100", 1, 8)),
        }
        answer = child.run(question, (), folder, folder / "child.log", lambda *_: None)
    return dict(answer["plan"])


def peak_bytes(row: dict[str, Any]) -> int:
    """Projected peak of a case.

    Raises:
        child.ChildError: the framework or the product refuses it.
    """
    return int(recorded(row)["peak_bytes"])


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description="Memory of one mixture-of-experts layer")
    parser.add_argument("cases", type=Path)
    parser.add_argument("words", nargs="*")
    asked = parser.parse_args()
    for row in yaml.safe_load(asked.cases.read_text(encoding="utf-8")):
        if asked.words and not any(word in row["id"] for word in asked.words):
            continue
        measured = row["measured"]["max_allocated_gib"]
        try:
            found = peak_bytes(row) / GIB
            said = f"{found:.3f} of {measured:.3f} GiB ({(found / measured - 1) * 100:+.2f} %)"
        except child.ChildError as error:
            said = f"skipped: {error}"
        sys.stdout.write(f"{row['id']}: {said}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
