"""Where the shipped configuration files are."""

from __future__ import annotations

from pathlib import Path


class ConfDirMissingError(RuntimeError):
    """The installation holds no configuration files."""


def hydra_conf_dir() -> Path:
    """Return the absolute path of the shipped ``hydra_conf`` folder.

    ``primus_ext/hydra_conf`` is a link to the top-level folder in a checkout (editable install)
    and a real folder in a wheel, so one relative path serves both.  It lies inside our package,
    not beside it: a top-level ``hydra_conf`` in site-packages would mix our config groups into
    those of anyone else who installs a folder of that common name.

    Returns:
        The resolved folder, which holds ``projection``, ``target_cluster`` and the others.

    Raises:
        ConfDirMissingError: if the folder is not there.
    """
    folder = Path(__file__).resolve().parent / "hydra_conf"
    if not folder.is_dir():
        raise ConfDirMissingError(
            f"primus_ext is installed without its configuration files: {folder} is not a folder; "
            "install the package again (a checkout needs a file system with symbolic links)"
        )
    return folder.resolve()
