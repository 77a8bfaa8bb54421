"""Mixture of experts: router, dispatcher, experts."""

from __future__ import annotations

from typing import Any

from primus_ext.frameworks.published import launchers
from primus_ext.frameworks.published.architecture import arch_key
from primus_ext.frameworks.published.draft import Draft, NotProjectable

# Router of a family, as its checkpoint's config.json has it.
_ROUTERS: dict[str, tuple[str, ...]] = {
    "deepseek-v3": (
        "--moe-router-score-function", "sigmoid", "--moe-router-num-groups", "8",
        "--moe-router-group-topk", "4", "--moe-router-topk-scaling-factor", "2.5",
        "--moe-router-enable-expert-bias", "--moe-router-dtype", "fp32",
        "--moe-router-load-balancing-type", "seq_aux_loss", "--moe-aux-loss-coeff", "1e-4",
    ),
    "deepseek-v2": (
        "--moe-router-pre-softmax", "--moe-router-load-balancing-type", "seq_aux_loss",
        "--moe-aux-loss-coeff", "1e-3",
    ),
    "primus-gpt-oss": (
        "--moe-router-pre-softmax", "--moe-router-load-balancing-type", "seq_aux_loss",
        "--moe-aux-loss-coeff", "1e-3",
    ),
    "qwen3": ("--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "1e-3"),
    "gpt-oss": ("--moe-router-load-balancing-type", "none"),
    "grok1": ("--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "1e-2"),
    "mixtral": ("--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "1e-2"),
}  # fmt: skip
_SIMUMAX = "SimuMax"
_FLEX = {"deepep": "deepep", "hybridep": "hybridep"}


def write(draft: Draft) -> None:
    """Arguments of the mixture of experts; nothing for a dense model.

    Raises:
        NotProjectable: a knob of the experts is not stated.
    """
    model = draft.run["model"]
    if not model.get("num_experts"):
        return
    draft.add(
        "--num-experts", model["num_experts"],
        "--moe-router-topk", draft.stated(model, "topk"),
        "--moe-ffn-hidden-size", draft.stated(model, "moe_ffn_hidden_size"),
    )  # fmt: skip
    dense = model.get("num_dense_layers") or 0
    if dense:
        draft.add("--moe-layer-freq", f"([0]*{dense}+[1]*{model['num_layers'] - dense})")
    if model.get("shared_expert_ffn_hidden_size"):
        draft.add("--moe-shared-expert-intermediate-size", model["shared_expert_ffn_hidden_size"])
        if draft.is_on("moe_shared_expert_overlap"):
            draft.add("--moe-shared-expert-overlap")
    _router(draft, model)
    _dispatcher(draft)
    _experts(draft)


def _router(draft: Draft, model: dict[str, Any]) -> None:
    if str(draft.run["source"]["name"]).startswith(_SIMUMAX):
        # simu_tools/megatron_scripts/scripts/run_pretrain_deepseekv2.sh at 4dcaae5, all models
        draft.add(
            "--moe-router-pre-softmax", "--moe-router-topk-scaling-factor", "16",
            "--moe-router-num-groups", draft.run["parallelism"]["ep"],
            "--moe-router-group-topk", "3",
            "--moe-router-load-balancing-type", "seq_aux_loss", "--moe-aux-loss-coeff", "3e-3",
        )  # fmt: skip
        return
    family = arch_key(draft)
    words = next((w for name, w in _ROUTERS.items() if family.startswith(name)), None)
    if words is None:
        draft.note("the router's scores and losses are not stated: Megatron's defaults")
    else:
        draft.add(*words)
    if launchers.habits(draft).router_fusion or launchers.is_sync_free(draft):
        draft.add("--moe-router-fusion")
    if launchers.is_sync_free(draft) and draft.run["precision"]["compute"] in ("fp8", "fp4"):
        draft.add("--moe-router-padding-for-quantization")
    if draft.flag("moe_router_force_load_balancing") or "force" in str(draft.flag("router")):
        draft.add("--moe-router-force-load-balancing")


def _dispatcher(draft: Draft) -> None:
    told = str(draft.flag("moe_dispatcher_backend", "moe_dispatcher") or "").lower()
    backend = told.split()[0] if told else ""
    usual = launchers.experts(draft)
    if not backend and usual is not None:
        backend = usual.dispatcher
        draft.note(f"the token dispatcher is not stated: {backend}, as its launcher has it")
    overlapped = draft.is_on("moe_a2a_overlap")
    if overlapped is None and usual is not None:
        overlapped = usual.overlap
    if overlapped:
        draft.add("--overlap-moe-expert-parallel-comm")
    if backend in _FLEX:
        draft.add("--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend", backend)
        if "--moe-router-dtype" not in draft.argv:
            draft.add("--moe-router-dtype", "fp32")  # both backends take no other
        return
    draft.add("--moe-token-dispatcher-type", "alltoall")
    if not backend and "alltoall" not in str(draft.flag("moe")):
        draft.note("the token dispatcher is not stated: all-to-all assumed")


def _experts(draft: Draft) -> None:
    told = str(draft.flag("moe", "moe_routing") or "")
    if "capacity factor" in told:
        draft.add("--moe-expert-capacity-factor", "1.0")
        if "pad" in told:
            draft.add("--moe-pad-expert-input-to-capacity")
        else:
            draft.note("experts drop tokens at capacity factor 1, without padding")
    if "grouped GEMM off" in told:
        draft.note("experts run one after another")
    else:
        draft.add("--moe-grouped-gemm")
    if launchers.permutation_is_fused(draft):
        draft.add("--moe-permute-fusion")
    if "Primus-Turbo" in draft.framework:
        draft.note("the legacy grouped GEMM, gone from 0.19, as Transformer Engine's")
    if draft.fsdp and draft.run["parallelism"].get("tp", 1) > 1:
        raise NotProjectable("experts under FSDP with tensor parallelism are not mapped")
