"""Replacements in Megatron-LM for training on CPUs (group ``cpu_training``).

Used through :func:`primus_ext.emulate.virtual_cuda.enable_cpu_training`.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch

from primus_ext.emulate.registry import patch

_MCORE = "megatron-core 0.19"


@patch("megatron.core.transformer.torch_norm", "WrappedTorchNorm", group="cpu_training",
       versions=_MCORE, reason="the local norm refuses sequence parallelism")
def _norm(module: Any) -> None:
    from primus_ext.emulate.cpu_spec import HostNorm

    module.WrappedTorchNorm = HostNorm


@patch("megatron.core.transformer.dot_product_attention", "DotProductAttention",
       group="cpu_training", versions=_MCORE,
       reason="the local attention refuses context parallelism and keeps whole score matrices")
def _attention(module: Any) -> None:
    from primus_ext.emulate.cpu_attention import HostAttention

    module.DotProductAttention = HostAttention


@patch("megatron.core.transformer.mla_qk_norm_config", "QKNormConfigResolver.resolve",
       group="cpu_training", versions=_MCORE,
       reason="the local layers of multi-latent attention without query compression name a query "
              "norm, which Megatron then refuses as unused")
def _mla_norm(module: Any) -> None:
    original = module.QKNormConfigResolver.resolve

    def resolve(self: Any) -> Any:
        if self.has_q_lora or not self.config.qk_layernorm or self.fused_norm_linear_impl:
            return original(self)
        return self._result(
            linear_q_proj=self.linear_impl,
            linear_q_up_proj=module.IdentityOp,
            linear_kv_up_proj=self.linear_impl,
            q_layernorm=module.IdentityOp,
            kv_layernorm=self.submodules.kv_layernorm,
        )

    module.QKNormConfigResolver.resolve = resolve


@patch("megatron.core.transformer.moe.moe_utils", "maybe_move_tensor_to_cpu",
       group="cpu_training", versions=_MCORE,
       reason="gloo's all_to_all_single takes lists of split sizes, no tensors; Megatron makes "
              "lists only of what it finds on a GPU")
def _splits(module: Any) -> None:
    original = module.maybe_move_tensor_to_cpu

    @functools.wraps(original)
    def to_numpy(tensor: Any, as_numpy: bool = False, **kwargs: Any) -> Any:
        if as_numpy and torch.is_tensor(tensor):
            return tensor.numpy()
        return original(tensor, as_numpy=as_numpy, **kwargs)

    module.maybe_move_tensor_to_cpu = to_numpy


@patch("megatron.core.optimizer.distrib_optimizer", "HAVE_APEX_OR_TE",
       "DistributedOptimizer.sharded_state_dict", "DistributedOptimizer.load_state_dict",
       "DistributedOptimizer._init_optimizer_states_with_dummy_values",
       group="cpu_training", versions=_MCORE,
       reason="with torch's Adam (no fused one of APEX or Transformer Engine) and in FP32 a "
              "checkpoint can't be resumed: the step counter is read before Adam has a state, one "
              "that starts anew is loaded and shared by all parameters, and views of parameters "
              "are written to")
def _resume(module: Any) -> None:
    owner = module.DistributedOptimizer
    sharded, load = owner.sharded_state_dict, owner.load_state_dict

    @functools.wraps(sharded)
    def sharded_state_dict(
        self: Any, model_sharded_state_dict: Any, is_loading: bool = False, *args: Any, **kw: Any
    ) -> Any:
        if is_loading and not module.HAVE_APEX_OR_TE and not self.optimizer.state:
            self._init_optimizer_states_with_dummy_values()  # the load replaces all of them
        return sharded(self, model_sharded_state_dict, is_loading, *args, **kw)

    @functools.wraps(load)
    def load_state_dict(self: Any, state_dict: Any) -> None:
        with torch.no_grad():
            load(self, state_dict)
        if not module.HAVE_APEX_OR_TE:
            for group in self.optimizer.param_groups:  # these do hold the saved counter
                for state in map(self.optimizer.state.get, group["params"]):
                    if state:
                        state["step"] = torch.tensor(float(group["step"]))

    owner.sharded_state_dict = sharded_state_dict
    owner.load_state_dict = load_state_dict


@patch("megatron.training.initialize", "initialize_megatron", group="cpu_training",
       versions=_MCORE, reason="pretrain() calls it without allow_no_cuda=True")
def _initialize(module: Any) -> None:
    module.initialize_megatron = functools.partial(
        module.initialize_megatron, allow_no_cuda=True
    )


@patch("megatron.core.datasets.utils", "compile_helpers", group="cpu_training",
       versions=_MCORE, reason="the wheel ships the compiled helper and no makefile")
def _helpers(module: Any) -> None:
    module.compile_helpers = lambda: None


@patch("megatron.core.tensor_parallel.random", "logging", group="cpu_training",
       versions=_MCORE,
       reason="it warns that the CPU's random state changed while the GPU's was forked: here both "
              "are one")
def _rng_warning(module: Any) -> None:
    logging.getLogger(module.__name__).setLevel(logging.ERROR)
