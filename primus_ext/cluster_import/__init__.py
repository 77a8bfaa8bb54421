"""Make accelerator and target files of what others wrote down or measured.

Read are the hardware files of Primus (``examples/hardware_configs/*.yaml``) and logs of nccl-tests
and rccl-tests.  What a file says goes into a user's own accelerator file (``like`` a shipped one)
or target file, each figure with its source; what has no place there is named.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import yaml

from primus_ext.cluster_files import ClusterError


@dataclasses.dataclass(frozen=True, slots=True)
class Imported:
    """What one file gave."""

    base: str
    """The shipped accelerator that it describes."""
    accelerator: dict[str, Any] | None
    """Content of an accelerator file, None where it says nothing new of the accelerator."""
    network: dict[str, Any]
    """For the ``network`` key of a target file."""
    notes: tuple[str, ...]
    """One line on each fit, and on each figure that was left."""


def read(path: Path, base: str | None = None) -> Imported:
    """Import a file, whichever of the kinds it is.

    Args:
        path: A Primus hardware file (YAML), or a log.
        base: The shipped accelerator that it describes; by default what the file says.

    Raises:
        ClusterError: it is neither, or the accelerator can't be told.
    """
    from primus_ext.cluster_import import hardware, logs

    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ClusterError(f"{path} can't be read: {error.strerror}") from error
    if path.suffix in (".yaml", ".yml"):
        return hardware.read(path.name, text, base)
    return logs.read(path.name, text, base)


def target_file(accelerator: str, nodes: int, gpus_per_node: int, imported: Imported) -> str:
    """A file for the ``target_cluster`` folder of a user's own configuration.

    Args:
        accelerator: Name of a shipped one, or the path of the imported accelerator file.
        nodes: Hosts.
        gpus_per_node: GPUs of a host.
        imported: What was read.
    """
    content: dict[str, Any] = {
        "accelerator": accelerator, "nodes": nodes, "gpus_per_node": gpus_per_node,
    }  # fmt: skip
    if imported.network:
        content["network"] = imported.network
    head = "# @package hydra.callbacks.primus_projection.target_cluster\n"
    return head + yaml.safe_dump(content, sort_keys=False, width=96)
