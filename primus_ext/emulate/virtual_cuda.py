"""A CUDA device that is not there: ``torch.cuda`` answers for it, tensors live on the CPU.

Megatron-LM places every tensor on ``cuda`` and asks ``torch.cuda`` for streams, random states and
the properties of the device.  :func:`install` makes all of that work without a device, for real
tensors (training on CPUs, see :func:`enable_cpu_training`) and for fake ones alike:

* ``torch.cuda.is_available()`` stays False: where it is True torch's own code (Adam's capture
  check, the data loader's pinning) goes on to call the driver.
* ``torch.cuda.device_count()`` is positive: at 0 Megatron skips its model-parallel groups.
* ``torch.cuda.current_device()`` is ``torch.device("cpu")``: a device object is right also where
  no function mode is active.

What it does not give: capture of CUDA graphs, memory pools, and the memory statistics of a
caching allocator (all zero).
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

from primus_ext import this_machine
from primus_ext.emulate import device_profile, registry
from primus_ext.emulate.device_profile import DeviceProfile, installed_device

__all__ = ["DeviceProfile", "enable_cpu_training", "install", "installed_device", "is_host"]


def is_host(device: Mapping[str, Any]) -> bool:
    """Whether the device of a request is this machine's processors, with local layers."""
    return device["name"] == this_machine.NAME


def install(device: DeviceProfile) -> None:
    """Install the virtual CUDA device.  Idempotent.

    It sets ``TORCHDYNAMO_DISABLE=1``: Megatron's ``jit_fuser`` is ``torch.compile``, bound when
    it is imported.

    Args:
        device: The device to answer for.

    Raises:
        RuntimeError: If Megatron is imported already (it decides at its import what it runs on),
            or if another device is installed.
    """
    present = installed_device()
    if present is not None:
        if present != device:
            raise RuntimeError(
                f"virtual device {present.name!r} is installed; a process has one, "
                f"so {device.name!r} can't be"
            )
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError("the virtual device must be installed before megatron is imported")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    device_profile.set_device(device)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # misses CUDA
    from primus_ext.emulate import shims_sharded, shims_torch  # noqa: F401  (declare)

    registry.apply_all("accelerator")
    shims_torch.enter_device_mode()


def enable_cpu_training() -> bool:
    """Make Megatron-LM train on CPUs, where there is no GPU; must precede ``import megatron``.

    Nothing happens with a GPU, or where a virtual device is installed already.  Otherwise the
    process gets what the launcher and the driver would have provided: a device that lives on the
    CPU, local layers that can do sequence and context parallelism, and, without torchrun, the
    rendezvous of a single process.  The process group must be gloo's.

    Returns:
        Whether this process trains on the CPU; also where that was made so before.
    """
    import torch

    if torch.cuda.is_available():
        return False
    present = installed_device()
    if present is not None:
        return present.name == this_machine.NAME
    for key, value in (
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1"),  # Megatron demands it for tp, cp on capability < 10
        ("RANK", "0"),
        ("LOCAL_RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("MASTER_ADDR", "localhost"),
    ):
        os.environ.setdefault(key, value)
    if "MASTER_PORT" not in os.environ:
        os.environ["MASTER_PORT"] = str(free_port())
    from primus_ext.observe import host_memory

    host_memory.one_memory = True
    install(_cpu_profile())
    if not _transformer_engine_usable():
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]
    from primus_ext.emulate import shims_cpu  # noqa: F401  (declares the patches)

    registry.apply_all("cpu_training")
    return True


def _cpu_profile() -> DeviceProfile:
    """This machine as one device a process, with the capability of a common accelerator."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    return DeviceProfile(
        name=this_machine.NAME,
        compute_capability=(9, 0),
        total_memory=memory // processes,
        multi_processor_count=os.cpu_count() or 1,
        device_count=processes,
    )


def _transformer_engine_usable() -> bool:
    """Its Python wheel may be there without the compiled library: then its import raises."""
    try:
        import transformer_engine.pytorch  # noqa: F401
    except Exception:  # whatever it raises, Megatron would be stopped by it
        for name in [n for n in sys.modules if n.partition(".")[0] == "transformer_engine"]:
            del sys.modules[name]
        return False
    return True


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    import socket

    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]
