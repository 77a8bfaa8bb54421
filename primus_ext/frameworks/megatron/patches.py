"""What must be different in megatron-core while a rank is emulated (group ``megatron``)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from primus_ext.emulate import fused
from primus_ext.emulate.registry import patch
from primus_ext.frameworks.megatron.world_patches import WORLD
from primus_ext.observe import recorder

_CORE = "megatron-core 0.19"


@patch("megatron.core.jit", "jit_fuser", group="megatron", versions=_CORE,
       reason="a function that torch.compile fuses is one kernel; eager execution shows several")
def _jit_fuser(module: Any) -> None:
    module.jit_fuser = fused.as_one_kernel


@contextlib.contextmanager
def _same_state(*_args: Any, **_kwargs: Any) -> Iterator[None]:
    yield


@patch("megatron.core.tensor_parallel.random", "CudaRNGStatesTracker.fork", "_fork_rng",
       "_get_all_rng_states", "_set_all_rng_states", group="megatron", versions=_CORE,
       reason="random states of tensors without storage neither exist nor matter")
def _random_states(module: Any) -> None:
    module.CudaRNGStatesTracker.fork = _same_state
    module._fork_rng = _same_state
    module._get_all_rng_states = lambda: ()
    module._set_all_rng_states = lambda *_states: None


@patch("megatron.core.optimizer.optimizer",
       "MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan",
       group=WORLD, versions=_CORE,
       reason="the overflow flag is a float that the host reads; there is never an overflow")
def _no_overflow(module: Any) -> None:
    check = module.MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan

    def never(self: Any) -> bool:
        check(self)
        return False

    module.MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan = never


@patch("megatron.training.training", "reduce_max_stat_across_model_parallel_group",
       "logical_and_across_model_parallel_group", group=WORLD, versions=_CORE,
       reason="statistics become new tensors of values that the host reads; an update never fails")
def _statistics(module: Any) -> None:
    reduce_max = module.reduce_max_stat_across_model_parallel_group

    def reduce_value(stat: Any, group: Any = None) -> Any:
        return reduce_max(None if stat is None else float(stat), group=group)

    module.reduce_max_stat_across_model_parallel_group = reduce_value
    module.logical_and_across_model_parallel_group = lambda value, group=None: value


@patch("megatron.core.tensor_parallel.random", "CheckpointWithoutOutput._recompute",
       group="megatron", versions=_CORE,
       reason="work that is done again inside the backward is recorded as such")
def _again(module: Any) -> None:
    recompute = module.CheckpointWithoutOutput._recompute

    def marked(self: Any, *args: Any) -> Any:
        active = recorder.current()
        if active is None:
            return recompute(self, *args)
        before, active.phase = active.phase, "recompute"
        try:
            return recompute(self, *args)
        finally:
            active.phase = before

    module.CheckpointWithoutOutput._recompute = marked


@patch("megatron.core.utils", "local_multi_tensor_l2_norm", group="megatron", versions=_CORE,
       reason="without fused kernels every norm is read on the host, to be put into a new tensor")
def _norms(module: Any) -> None:
    original = module.local_multi_tensor_l2_norm

    def local_multi_tensor_l2_norm(
        chunk_size: int, noop_flag: Any, tensor_lists: Any, per_tensor: bool, *args: Any
    ) -> Any:
        tensors = [tensor for tensors in tensor_lists for tensor in tensors]
        if not tensors or not isinstance(tensors[0], FakeTensor):
            return original(chunk_size, noop_flag, tensor_lists, per_tensor, *args)
        norms = [torch.norm(tensor) for tensor in tensors]  # these live as long as the original's
        reduced = torch.norm(torch.stack(norms))
        return reduced.view(1).clone(), None

    module.local_multi_tensor_l2_norm = local_multi_tensor_l2_norm


@patch("megatron.core.tensor_parallel.random", "_get_share_storage", group="megatron",
       versions=_CORE,
       reason="a C++ extension that takes 40 s and a compiler to build, to make one storage stand "
              "for another: where tensors have no storage it is enough that the other one lives on")
def _share_storage(module: Any) -> None:
    compiled = module._get_share_storage
    unwatched: Any = vars(torch._C.StorageBase)["resize_"]

    def share_storage(output: Any, recomputed: Any) -> None:
        if not isinstance(output, FakeTensor):
            compiled()(output, recomputed)
            return
        storage: Any = output.untyped_storage()
        other = recomputed.untyped_storage()
        # Not through the method that the recorder watches: the extension tells nobody either.
        unwatched(storage, other.nbytes())
        storage.stands_for = other  # which lives as long, as with the extension

    module._get_share_storage = lambda: share_storage
