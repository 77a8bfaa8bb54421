"""Activation offload (fine-grained, by module, and Transformer Engine's by layer)."""

from __future__ import annotations

from typing import Any

import torch

from primus_ext.emulate.registry import patch
from primus_ext.emulate.session import ProgramError

_CORE = "megatron-core 0.19"


@patch("megatron.core.pipeline_parallel.fine_grained_activation_offload",
       "ChunkOffloadHandler._can_manage_tensor_for_offload", group="megatron", versions=_CORE,
       reason="tensors of the virtual device are CPU tensors, fake ones as well")
def _manages(module: Any) -> None:
    def can_manage(tensor: torch.Tensor) -> bool:
        return not isinstance(tensor, torch.nn.Parameter) and tensor.is_cuda

    module.ChunkOffloadHandler._can_manage_tensor_for_offload = staticmethod(can_manage)


@patch("megatron.core.pipeline_parallel.utils", "set_ideal_affinity_for_current_gpu",
       group="megatron", versions=_CORE,
       reason="it asks the driver which cores are near the GPU, and would pin this process to them")
def _affinity(module: Any) -> None:
    module.set_ideal_affinity_for_current_gpu = lambda: None


def end_of_step(config: Any) -> None:
    """What Megatron's schedules do at their end: the next microbatch is the step's first again."""
    if getattr(config, "fine_grained_activation_offloading", False):
        from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
            FineGrainedActivationOffloadingInterface,
        )

        FineGrainedActivationOffloadingInterface.reset()


def refuse_unsupported(args: Any) -> None:
    """Which tensors stay on the device depends on the whole schedule; one case does not.

    Megatron keeps, of the chunk whose backward is next, the last tensors of each kind.  Without
    pipeline parallelism that is every microbatch, and all are alike.

    Raises:
        ProgramError: activations are offloaded in a way that differs between microbatches.
    """
    if not getattr(args, "fine_grained_activation_offloading", False):
        return
    if args.pipeline_model_parallel_size > 1:
        raise ProgramError(
            "fine_grained_activation_offloading=True with pipeline_model_parallel_size="
            f"{args.pipeline_model_parallel_size} can't be projected by this version, as "
            "microbatches then keep different tensors; legal: pipeline_model_parallel_size=1"
        )
    fraction = args.activation_offload_fraction
    if fraction != 1.0:
        raise ProgramError(
            f"activation_offload_fraction={fraction} can't be projected by this version, as "
            "microbatches then keep different tensors; legal: 1.0"
        )
