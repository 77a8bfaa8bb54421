"""What must be different in Megatron-FSDP while a rank is emulated (group ``megatron``)."""

from __future__ import annotations

from typing import Any

import torch

from primus_ext.emulate.host_tensor import on_host
from primus_ext.emulate.registry import patch

_CORE = "megatron-core 0.19"
_ADAPTER = "megatron.core.distributed.fsdp.mcore_fsdp_adapter"


@patch(_ADAPTER, "_get_dp_tp_mesh", "_get_hsdp_tp_mesh", group="megatron", versions=_CORE,
       reason="the ranks of a device mesh are values that the host needs")
def _meshes(module: Any) -> None:
    module._get_dp_tp_mesh = on_host(module._get_dp_tp_mesh)
    module._get_hsdp_tp_mesh = on_host(module._get_hsdp_tp_mesh)



@patch("megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer",
       "_check_nan_in_grad", group="megatron", versions=_CORE,
       reason="whether a gradient is finite is a flag that the host reads, and no flag is up")
def _finite(module: Any) -> None:
    def check(grad: torch.Tensor) -> None:
        norm = torch.linalg.norm(grad)
        torch.isnan(norm)
        torch.isfinite(norm)

    module._check_nan_in_grad = check


@patch("megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor",
       "validate_uneven_dtensor", group="megatron", versions=_CORE,
       reason="the place of a shard, which only checkpoints use, follows from what all ranks hold: "
              "virtual ranks hold what this one holds, which does not add up")
def _places(module: Any) -> None:
    module.validate_uneven_dtensor = lambda dtensor: None


@patch("megatron.core.distributed.fsdp.src.megatron_fsdp.utils",
       "FSDPDistributedIndex.get_logical_hybrid_fsdp_rank", group="megatron", versions=_CORE,
       reason="the place of a rank among the replicas' shards is a value that the host needs")
def _place_of_rank(module: Any) -> None:
    owner = module.FSDPDistributedIndex
    owner.get_logical_hybrid_fsdp_rank = on_host(owner.get_logical_hybrid_fsdp_rank)
