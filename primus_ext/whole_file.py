"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write(path: Path, text: str) -> Path:
    """Write a file into an existing directory.

    It is written beside its place and moved there, so that a reader never sees a part of it and a
    full disk leaves an older one as it was.

    Returns:
        The path.

    Raises:
        OSError: The directory is missing, not writable or full; no partial file is left.
    """
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)  # mkstemp's 0600 would hide it from the rest of a team
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return path
