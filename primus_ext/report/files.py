"""``projection.json``: whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from primus_ext import whole_file
from primus_ext.project.result import Projection
from primus_ext.trace import to_plain

PROJECTION_FILE = "projection.json"


def plain(projection: Projection) -> dict[str, Any]:
    """The content of ``projection.json``: numbers in SI units, ``schema_version`` first."""
    content = to_plain(projection)
    return {"schema_version": content.pop("schema_version"), **content}


def write(projection: Projection, directory: Path) -> Path:
    """Write ``projection.json`` into an existing directory.

    Args:
        projection: The answer.
        directory: Where it goes.

    Returns:
        The path of the file.

    Raises:
        OSError: The directory is missing, not writable or full; no partial file is left.
    """
    text = json.dumps(plain(projection), indent=1, allow_nan=False) + "\n"
    return whole_file.write(directory / PROJECTION_FILE, text)
