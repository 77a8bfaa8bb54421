"""Where Megatron would name Transformer Engine's layers (group ``no_transformer_engine``)."""

from __future__ import annotations

from typing import Any

from primus_ext.emulate.registry import patch

GROUP = "no_transformer_engine"
_CORE = "megatron-core 0.19"


@patch("megatron.core.transformer.torch_norm", "WrappedTorchNorm", group=GROUP, versions=_CORE,
       reason="the final norm without Transformer Engine refuses sequence parallelism")
def _final_norm(module: Any) -> None:
    from primus_ext.emulate.no_te.norm import Norm

    module.WrappedTorchNorm = Norm


@patch("megatron.core.models.gpt.gpt_layer_specs", "TESpecProvider", "TENorm", group=GROUP,
       versions=_CORE, reason="without Transformer Engine these names are None")
def _layer_specs(module: Any) -> None:
    from primus_ext.emulate.no_te.norm import Norm
    from primus_ext.emulate.no_te.provider import StandInSpecProvider

    module.TESpecProvider, module.TENorm = StandInSpecProvider, Norm


@patch("megatron.core.transformer.multi_token_prediction", "TESpecProvider", group=GROUP,
       versions=_CORE, reason="without Transformer Engine the name is None")
def _multi_token_prediction(module: Any) -> None:
    from primus_ext.emulate.no_te.provider import StandInSpecProvider

    module.TESpecProvider = StandInSpecProvider


@patch("megatron.core.models.common.embeddings.rope_utils", "fused_apply_rotary_pos_emb",
       group=GROUP, versions=_CORE, reason="without Transformer Engine the name is None")
def _rope(module: Any) -> None:
    from primus_ext.emulate.no_te.rope import fused_apply_rotary_pos_emb

    module.fused_apply_rotary_pos_emb = fused_apply_rotary_pos_emb


@patch("megatron.core.utils", "local_multi_tensor_l2_norm", "local_multi_tensor_scale",
       group=GROUP, versions=_CORE,
       reason="without Transformer Engine norms go through the host, tensor by tensor")
def _multi_tensor(module: Any) -> None:
    from primus_ext.emulate.no_te import optimizer

    module.local_multi_tensor_l2_norm = optimizer.l2_norm
    module.local_multi_tensor_scale = optimizer.scale


@patch("megatron.core.optimizer", "Adam", "USING_PYTORCH_OPTIMIZER", group=GROUP, versions=_CORE,
       reason="without Transformer Engine torch's Adam updates parameter by parameter")
def _adam(module: Any) -> None:
    from primus_ext.emulate.no_te.optimizer import FusedAdam

    module.Adam, module.USING_PYTORCH_OPTIMIZER = FusedAdam, False
