"""Replacements in torch for sharded parameters (groups ``no_storage`` and ``accelerator``).

Device meshes are arithmetic on the host: they compute with real values also where tensors have no
storage.
"""

from __future__ import annotations

from typing import Any

import torch

from primus_ext.emulate.host_tensor import on_host
from primus_ext.emulate.registry import patch
from primus_ext.emulate.shims_stream import HostEvent

_TORCH = "torch 2.6 to 2.14"
_MESH = (
    "__init__", "from_group", "mesh", "get_local_rank", "get_coordinate", "__getitem__",
    "_flatten", "__hash__", "__eq__",
)  # fmt: skip


@patch("torch.distributed.device_mesh", *(f"DeviceMesh.{name}" for name in _MESH),
       "init_device_mesh", group="no_storage", versions=_TORCH,
       reason="the ranks of a device mesh are values that the host needs")
def _device_mesh(module: Any) -> None:
    owner: Any = module.DeviceMesh
    for name in _MESH:
        value: Any = vars(owner)[name]
        if isinstance(value, property):
            getter: Any = value.fget
            replaced: Any = property(on_host(getter))
        elif isinstance(value, staticmethod):
            replaced = staticmethod(on_host(value.__func__))
        else:
            replaced = on_host(value)
        setattr(owner, name, replaced)
    module.init_device_mesh = on_host(module.init_device_mesh)


@patch("torch.distributed.fsdp._fully_shard._fsdp_init", "_get_device_from_mesh",
       group="accelerator", versions="torch 2.6 to 2.14",
       reason="the tensors of the virtual device lie on the CPU")
def _device_of_mesh(module: Any) -> None:
    module._get_device_from_mesh = lambda mesh: torch.device("cpu")


@patch("torch.distributed.device_mesh", "_get_device_handle", group="accelerator",
       versions=_TORCH, reason="tensors on the CPU are the virtual device's: it has the streams")
def _device_handle(module: Any) -> None:
    module._get_device_handle = lambda device_type="cuda": torch.cuda


@patch("torch.accelerator", "current_stream", group="accelerator", versions="torch 2.6 to 2.14",
       reason="the accelerator's current stream is that of the virtual device")
def _accelerator_stream(module: Any) -> None:
    module.current_stream = lambda device=None: torch.cuda.current_stream()


@patch("torch.distributed.distributed_c10d", "_CoalescingManager.append",
       "_CoalescingManager.wait", group="accelerator", versions=_TORCH,
       reason="who waits for coalesced collectives is seen by no dispatched op")
def _coalesced(module: Any) -> None:
    owner: Any = module._CoalescingManager
    append, wait = owner.append, owner.wait

    def noted(self: Any, work: Any = None) -> None:
        append(self, work)
        self.issued = HostEvent()
        self.issued.record()

    def waited(self: Any) -> None:
        wait(self)
        if hasattr(self, "issued"):
            self.issued.wait()

    owner.append, owner.wait = noted, waited
