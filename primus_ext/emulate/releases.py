"""Which releases of the frameworks are here, and which this package was made for.

The releases are looked up without importing anything: a release that does not fit may not even
import over the virtual device.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import re
import sys
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

UNTESTED = "PRIMUS_EXT_UNTESTED"
"""Environment variable: with 1, other releases are tried, and the report says so."""


@dataclasses.dataclass(frozen=True, slots=True)
class Release:
    """What this package needs of another one."""

    package: str
    """Name of the distribution."""
    module: str
    """Its top-level module."""
    accepted: str
    """Version specifier, as in pyproject.toml: what is known to matter."""
    tested: str
    """The one release that the tests run with, as in constraints.txt."""
    needed: bool = True
    """Whether nothing works without it."""


NEEDED = (
    Release("torch", "torch", ">=2.6", "2.14.1"),
    Release("megatron-core", "megatron", ">=0.19,<0.20", "0.19.2"),
    # without it stand-in layers serve (primus_ext.emulate.no_te)
    Release("transformer-engine", "transformer_engine", ">=2.20,<2.21", "2.20.2", needed=False),
)


def problem(missing: bool = True) -> str | None:
    """The first release that does not fit, in one sentence; None if all do.

    Args:
        missing: Whether one that can't be found doesn't fit either (a program may add its place
            to ``sys.path`` later).
    """
    for release in NEEDED:
        version = found(release)
        if version is None:
            if release.needed and missing:
                return (
                    f"{release.package} is not installed for {sys.executable}; "
                    f"this version of primus_ext is tested with {release.package} {release.tested}"
                )
        elif not _accepts(release, version):
            return (
                f"{release.package} {version} is installed, which this version of primus_ext does "
                f"not support: it takes {release.package} {release.accepted} and is tested with "
                f"{release.tested} ({UNTESTED}=1 tries it all the same)"
            )
    return None


def allowed() -> bool:
    """Whether the user wants releases to be tried that this package was not made for."""
    return os.environ.get(UNTESTED) == "1"


def found(release: Release) -> str | None:
    """The release that an import would find, None where there is none."""
    folders = _folders(release.module)
    if folders is None:
        return None
    if release.module == "megatron":
        return _megatron(folders)
    try:
        return importlib.metadata.version(release.package)
    except importlib.metadata.PackageNotFoundError:
        return "of an unknown release"


def _accepts(release: Release, version: str) -> bool:
    try:
        parsed = Version(version)
    except InvalidVersion:
        return False
    return SpecifierSet(release.accepted).contains(parsed, prereleases=True)


def _folders(module: str) -> list[str] | None:
    """Where a top-level package lies; it is not imported."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return None if spec is None else list(spec.submodule_search_locations or ())


def _megatron(folders: list[str]) -> str | None:
    """A checkout of Megatron-LM has no metadata, but both have ``core/package_info.py``."""
    for folder in folders:
        path = Path(folder) / "core" / "package_info.py"
        if path.is_file():
            numbers = dict(re.findall(r"(?m)^(MAJOR|MINOR|PATCH) *= *(\d+)", path.read_text()))
            known = [numbers[name] for name in ("MAJOR", "MINOR", "PATCH") if name in numbers]
            return ".".join(known) if len(known) == 3 else "of an unknown release"
        if (Path(folder) / "core").is_dir():
            return "of an unknown release"
    return None
