"""Kernels, fusions and what of a run has no counterpart."""

from __future__ import annotations

from primus_ext.frameworks.published import launchers, torchtitan
from primus_ext.frameworks.published.draft import Draft

TE_LOSS = "primus_ext.frameworks.megatron.te_loss"
DEEPSPEED = "primus_ext.frameworks.megatron.deepspeed"
BEFORE_FLASH = "primus_ext.frameworks.megatron.before_flash"
OLD_ENGINE = "primus_ext.frameworks.megatron.te_2024"
# Flags that change time or memory and are not projected: on where their value is not in the set.
_LEFT_OUT = (
    (("DEFER_EMBEDDING_WGRAD_COMPUTE",), "deferred weight gradient of the embedding"),
    (("FP8_DPA",), "attention in FP8"),
    (("async_tp",), "asynchronous tensor parallelism"),
)
_LAYER_GRAPHS = ("cuda_graphs", "MCORE_CUDA_GRAPH", "LAYER_CUDA_GRAPH")
_OFF = ("none", "false", "0", "")


def write(draft: Draft) -> None:
    """Arguments of kernels and of a run without data."""
    draft.add(
        "--transformer-impl", "transformer_engine", "--mock-data",
        "--tokenizer-type", "NullTokenizer", "--train-iters", "10", "--lr", "1e-4",
        "--no-check-for-nan-in-loss-and-grad",
    )  # fmt: skip
    draft.add(*launchers.habits(draft).arguments)
    launchers.write_states(draft)
    unfused = "--no-gradient-accumulation-fusion"
    if draft.is_on("gradient_accumulation_fusion") is False and unfused not in draft.argv:
        draft.add(unfused)
    if draft.flag("activation_offload_layers"):
        draft.add("--cpu-offloading-num-layers", draft.flag("activation_offload_layers"))
    _kernels(draft)
    _host(draft)
    _attention_kernel(draft)
    _tp_overlap(draft)
    if launchers.habits(draft).old_engine:
        draft.emulations.append(OLD_ENGINE)
    if "DeepSpeed" in draft.framework:
        draft.emulations.append(DEEPSPEED)
        draft.note("Megatron-DeepSpeed projected as Megatron-LM that keeps what DeepSpeed keeps")
    for names, words in _LEFT_OUT:
        if str(draft.flag(*names) or "").lower() not in _OFF:
            draft.note(f"{words}: left out")


def _kernels(draft: Draft) -> None:
    if draft.flag("flash_attention") is False:  # before flash attention: nothing of the loss fused
        draft.add("--attention-backend", "unfused")
        draft.emulations.append(BEFORE_FLASH)
        if "--sequence-parallel" not in draft.argv:
            # Megatron-LM to 2023 (arguments.py), DeepSpeed 0.6 (is_pipe_partitioned): stages send
            # a piece from each tensor-parallel rank
            draft.conditions["scatter_gather_tensors_in_pipeline"] = "1"
    elif _te_loss(draft):
        draft.add("--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "te")
        draft.emulations.append(TE_LOSS)
        draft.note(
            "Transformer Engine's cross entropy as it ran (0.19 refuses it for instabilities)"
        )
    elif draft.is_on("loss_fusion") is not False:
        draft.add("--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "native")
        torchtitan.write_loss(draft)


def _tp_overlap(draft: Draft) -> None:
    """Tensor-parallel communication beside products, as stated or as the launcher has it."""
    overlapped = draft.is_on("TP_COMM_OVERLAP", "tp_comm_overlap")
    if "--sequence-parallel" not in draft.argv:
        return
    if overlapped is None and launchers.habits(draft).tp_comm_overlap:
        overlapped = True
        draft.note("tp_comm_overlap is not stated: on, as its launcher has it")
    if overlapped:
        draft.conditions["tp_comm_overlap"] = "1"


def _attention_kernel(draft: Draft) -> None:
    """Fused attention other than the one that Transformer Engine would choose today."""
    if torchtitan.ran(draft):
        # torch's scaled_dot_product_attention: flash-attn 2 before cuDNN's
        draft.conditions["attention_kernel"] = "flash2"
        draft.note("attention of torch: flash-attn 2's kernels")
    elif "triton" in str(draft.flag("attention") or ""):
        # a table older than torch 2.0 (March 2023) is older than flash-attn 2 (July 2023)
        draft.conditions["attention_kernel"] = "triton"
        draft.note("attention: FlashAttention in Triton, as LLM Foundry had it before torch 2.0")


def _host(draft: Draft) -> None:
    """Who issues the kernels: CUDA graphs, a host that waits for each of them."""
    if str(draft.flag("cuda_launch_blocking") or "").startswith("probably 1"):
        draft.conditions["CUDA_LAUNCH_BLOCKING"] = "1"
        draft.note("CUDA_LAUNCH_BLOCKING=1, which the authors probably set")
    implementation = draft.flag("cuda_graph_impl")
    if implementation is None and draft.is_on(*_LAYER_GRAPHS):
        implementation = "local"
    if implementation in (None, "none"):
        return
    scope = draft.flag("cuda_graph_scope") or ()
    modules = [scope] if isinstance(scope, str) else list(scope)
    if "full_iteration" in modules:
        implementation, modules = "full_iteration", []
    draft.conditions |= {
        "cuda_graph_impl": str(implementation), "cuda_graph_modules": ",".join(modules)
    }  # fmt: skip


def _te_loss(draft: Draft) -> bool:
    """Whether the run used Transformer Engine's fused cross entropy.

    Primus' "loss fusion" is that of Transformer Engine (its examples/moe_package), and the steps
    of that study are cumulative.
    """
    if draft.flag("cross_entropy_fusion") == "TE" or draft.is_on("loss_fusion"):
        return True
    if launchers.habits(draft).te_loss:
        return True
    step = draft.flag("cumulative_optimisations")
    return step is not None and "base" not in step and draft.is_on("loss_fusion") is None
