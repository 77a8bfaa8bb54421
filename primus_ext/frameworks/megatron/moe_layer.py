"""One mixture-of-experts layer, forward and backward, as Megatron-LM's own benchmark of it runs.

``python -m primus_ext.frameworks.megatron.moe_layer CASE`` under the bootstrap, where CASE is JSON:
``seq_length``, ``micro_batch_size``, ``dtype`` and ``config``, keyword arguments of Megatron's
TransformerConfig.  The benchmark is ``tests/functional_tests/test_cases/common/moe_perf`` of
Megatron-LM: a bare layer without data-parallel wrapper or optimizer, whose gradients are dropped
before every iteration.  The answer's plan has ``peak_bytes``, the highest live bytes of an
iteration after the first ones, ``weight_bytes``, and what that iteration does: ``ops``, ``groups``,
and for ``forward`` and ``backward`` the numbers of their ops in order.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
from typing import Any

import torch

from primus_ext.emulate import session, virtual_world
from primus_ext.frameworks.megatron import moe_2025
from primus_ext.observe.recorder import Recorder
from primus_ext.trace import to_plain

WARM_UP = 2
"""Iterations before the one that counts: caches and workspaces are there after the first."""

WORKSPACE = {9: 2**25, 10: 2**25}
"""Bytes of torch's cuBLAS workspace by major compute capability (``getChosenWorkspaceSize`` in
``aten/src/ATen/cuda/CublasHandlePool.cpp``, torch 2.14): before every iteration the benchmark runs
a product of torch's own, whose workspace stays in torch's allocator."""
_SMALL_WORKSPACE = (2 * 4096 + 8 * 16) * 1024


def run(case: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    """Peak bytes and ops of an iteration of the layer on rank 0.

    Args:
        case: See the module.
        request: The session's: ``world_size``, ``gpus_per_node``, ``device``.
    """
    from megatron.core import parallel_state
    from megatron.core.config import set_experimental_flag
    from megatron.core.transformer.transformer_config import TransformerConfig

    moe_2025.install(request)  # the release whose figures are published
    virtual_world.join(0, int(request["world_size"]), int(request["gpus_per_node"]))
    config = TransformerConfig(
        params_dtype=getattr(torch, case["dtype"]), bf16=case["dtype"] == "bfloat16",
        num_layers=1, perform_initialization=False, **case["config"],
    )  # fmt: skip
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        expert_model_parallel_size=config.expert_model_parallel_size,
        expert_tensor_parallel_size=config.expert_tensor_parallel_size,
        create_gloo_process_groups=False,
    )
    set_experimental_flag(True)
    recorder = Recorder({})
    with virtual_world.no_storage(), recorder:
        layer = _layer(config)
        shape = (case["seq_length"], case["micro_batch_size"], config.hidden_size)
        tokens = torch.empty(shape, dtype=config.params_dtype, requires_grad=True)
        weights = recorder.memory.live
        major = int(request["device"]["compute_capability"][0])
        workspace = torch.empty(WORKSPACE.get(major, _SMALL_WORKSPACE), dtype=torch.uint8)
        held: list[torch.Tensor] = []
        for _ in range(WARM_UP):
            _iteration(layer, tokens, recorder, held)
        recorder.recording = True
        peak = _iteration(layer, tokens, recorder, held)
        del workspace
    return {"peak_bytes": peak, "weight_bytes": weights, **_recorded(recorder)}


def _recorded(recorder: Recorder) -> dict[str, Any]:
    phases: dict[str, list[int]] = {"forward": [], "backward": []}
    for _, _, call in recorder.calls:
        phases[call.phase].append(call.op)
    groups = {name: list(ranks) for name, ranks in recorder.groups_seen.items()}
    return {"ops": to_plain(recorder.ops), "groups": groups, **phases}


def _layer(config: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_with_transformer_engine_submodules,
    )
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.spec_utils import get_submodules

    submodules: Any = get_submodules(
        get_gpt_layer_with_transformer_engine_submodules(
            num_experts=config.num_moe_experts, moe_grouped_gemm=True
        ).mlp
    )
    return MoELayer(config=config, submodules=submodules).cuda().to(config.params_dtype).train()


def _iteration(
    layer: Any, tokens: torch.Tensor, recorder: Recorder, held: list[torch.Tensor]
) -> int:
    """Forward and backward; the highest live bytes inside.

    Args:
        layer: The layer.
        tokens: Its input.
        recorder: It counts.
        held: Output and gradient of the iteration before, which the benchmark's variables keep
            until this one's are there; replaced.
    """
    from megatron.core.fp8_utils import get_fp8_context

    tokens.grad = None
    layer.zero_grad(set_to_none=True)
    gc.collect()
    recorder.memory.reset_peak()
    with get_fp8_context(layer.config) if layer.config.fp8 else contextlib.nullcontext():
        recorder.phase = "forward"
        output, _ = layer(tokens)
        held[:1] = [output]
        gradient = torch.empty_like(output)
        held[1:] = [gradient]
        recorder.phase = "backward"
        output.backward(gradient)
    return recorder.memory.peak


def main() -> None:
    """Answer the request that started this process."""
    active = session.current()
    session.imported()
    active.finish(run(json.loads(sys.argv[1]), active.request), None, [])


if __name__ == "__main__":
    main()
