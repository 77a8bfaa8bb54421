"""``projection.json``: whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from primus_ext.project.result import Projection
from primus_ext.trace import to_plain

PROJECTION_FILE = "projection.json"


def plain(projection: Projection) -> dict[str, Any]:
    """The content of ``projection.json``: numbers in SI units, ``schema_version`` first."""
    content = to_plain(projection)
    return {"schema_version": content.pop("schema_version"), **content}


def write(projection: Projection, directory: Path) -> Path:
    """Write ``projection.json`` into an existing directory.

    The file is written beside its place and moved there, so that a reader never sees a part of it
    and a full disk leaves an older one as it was.

    Args:
        projection: The answer.
        directory: Where it goes.

    Returns:
        The path of the file.

    Raises:
        OSError: The directory is missing, not writable or full; no partial file is left.
    """
    path = directory / PROJECTION_FILE
    handle, name = tempfile.mkstemp(prefix=".projection-", dir=directory)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(plain(projection), file, indent=1, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)  # mkstemp's 0600 would hide it from the rest of a team
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return path
