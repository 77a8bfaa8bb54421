"""What the launchers behind published tables set without saying so, from their public sources."""

from __future__ import annotations

import dataclasses

from primus_ext.frameworks.published.architecture import arch_key
from primus_ext.frameworks.published.draft import Draft


@dataclasses.dataclass(frozen=True, slots=True)
class Habits:
    """Knobs that a launcher sets; None where it is not known."""

    gradients: str | None = None
    """Format of the gradients' buffer and reduction: fp32 or bf16."""
    fp8_weights: bool | None = None
    """With FP8: whether weights are kept in FP8."""
    arguments: tuple[str, ...] = ()
    """Kernels and fusions that it switches for every run."""
    router_fusion: bool = False
    te_loss: bool = False
    """Transformer Engine's fused cross entropy."""
    tp_comm_overlap: bool = False
    """Whether tensor-parallel communication runs beside products."""
    states_in_bf16: bool = False
    """Whether optimizer states, and gradients, have the weights' format, with no FP32 masters."""
    old_engine: bool = False
    """Whether its Transformer Engine is from before April 2025; see the emulation of that."""


# Words in the name of the framework, words in the name of the architecture, what is set.
_HABITS = (
    # NVIDIA-NeMo/Automodel examples/benchmark/configs: torch.optim.Adam of the model's parameters,
    # which are BF16 as the checkpoints' config.json says
    ("AutoModel", "", Habits(gradients="bf16", states_in_bf16=True)),
    # src/megatron/bridge/training/mixed_precision.py: every FP8 recipe but sub-channel scaling
    # src/megatron/bridge/perf_recipes: moe_router_fusion, cross_entropy_fusion_impl (before v0.6.0
    # scripts/performance/utils/{helpers,overrides}.py)
    # perf_recipes/llama: comm_overlap.tp_comm_overlap_cfg=userbuffers_* where tp > 1
    ("Megatron-Bridge", "llama", Habits(
        fp8_weights=True, router_fusion=True, te_loss=True, tp_comm_overlap=True)),
    ("Megatron-Bridge", "", Habits(fp8_weights=True, router_fusion=True, te_loss=True)),
    # NVIDIA/dgxc-benchmarking grok1/grok1_314b.yaml: grad_sync_dtype bf16, fp8_params false
    # (all of these ran in containers of 2024, nvcr.io/nvidia/nemo:24.09 to 24.12)
    ("NeMo 1.x", "grok", Habits(gradients="bf16", fp8_weights=False, old_engine=True)),
    # NVIDIA/dgxc-benchmarking llama3.1/configure.sh: +model.fp8_params=$FP8_ENABLED; gradients as
    # nowhere said (NVIDIA/NeMo-Framework-Launcher conf/training/llama/llama3_1_8b.yaml either):
    # NeMo 1.x reduces in FP32 then
    ("NeMo 1.x", "llama", Habits(gradients="fp32", fp8_weights=True, old_engine=True)),
    # NVIDIA/dgxc-benchmarking nemotron/nemotron4-15b-synth.yaml: neither is set; ub_tp_comm_overlap
    ("NeMo 1.x", "nemotron", Habits(
        gradients="fp32", fp8_weights=False, tp_comm_overlap=True, old_engine=True)),
    # NeMo 2.0 scripts/performance: bf16_with_fp8_mixed (fp8_params), grad_reduce_in_fp32 False;
    # tp_comm_overlap where tp > 1 as Megatron-Bridge's scripts/performance/utils/overrides.py
    ("NeMo 2.0", "", Habits(gradients="bf16", fp8_weights=True, tp_comm_overlap=True)),
    # mlcommons/training_results_v5.1 Cisco/benchmarks/llama31_8b/implementations/nemo/pretrain.py
    # (NVIDIA's): grad_reduce_in_fp32=False, of the precision and of the data parallelism
    ("NeMo / Megatron-Core", "llama", Habits(gradients="bf16")),
    # MLPerf Training v3.1 and v4.1, containers of 2023 and 2024
    ("NeMo / Megatron-Core", "gpt3", Habits(old_engine=True)),
    # AMD-AGI/Primus examples/moe_package/configs/MI355X, primus/configs/models/megatron
    ("Primus-Turbo", "deepseek", Habits(
        gradients="fp32", arguments=("--no-rope-fusion", "--no-gradient-accumulation-fusion"))),
    # MooreThreads/SimuMax run_pretrain_*.sh: --accumulate-allreduce-grads-in-fp32
    ("Megatron-LM", "", Habits(gradients="fp32", fp8_weights=True)),
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Experts:
    """How a launcher runs experts where the row does not say so."""

    dispatcher: str
    """all-to-all, deepep or hybridep."""
    overlap: bool
    """Whether dispatch and combine run beside the other direction of another microbatch."""


# NVIDIA-NeMo/Megatron-Bridge: release, architectures, products, formats, what its recipe sets.
_EXPERTS = (
    # v0.1.0rc4 scripts/performance/run_script.py: enable_deepep on H100
    ("v0.1.0", "deepseek", ("H100",), "", Experts("deepep", False)),
    # v0.5.0 scripts/performance, v0.6.0 src/megatron/bridge/perf_recipes/*/common.py:
    # _enable_*_full_iteration_mxfp8, _apply_gpt_oss_120b_full_iter_fp8mx_configs
    ("v0.5", "", ("GB200", "GB300"), "mxfp8", Experts("hybridep", True)),
    ("v0.6", "", ("GB200", "GB300"), "mxfp8", Experts("hybridep", True)),
)  # fmt: skip


def experts(draft: Draft) -> Experts | None:
    """What the recipe of a run sets for its experts; None where it is not known."""
    release = str((draft.run["source"].get("config") or {}).get("tag") or "")
    product = str(draft.run["hardware"].get("gpu"))
    recipe = str(draft.run["precision"].get("recipe"))
    for tag, architecture, products, number_format, found in _EXPERTS:
        if (
            release.startswith(tag)
            and architecture in arch_key(draft)
            and product.startswith(products)
            and number_format in recipe
        ):
            return found
    return None


def habits(draft: Draft) -> Habits:
    """What the launcher of a run sets."""
    family = arch_key(draft)
    return next(
        (
            found
            for framework, architecture, found in _HABITS
            if framework in draft.framework and architecture in family
        ),
        Habits(),
    )


_STATES = (
    "--use-precision-aware-optimizer", "--main-grads-dtype", "bf16",
    "--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16",
)  # fmt: skip


def write_states(draft: Draft) -> None:
    """Formats of the optimizer's states, where the launcher is known for other than FP32."""
    if "--use-distributed-optimizer" not in draft.argv:
        return
    if draft.flag("optimizer_states") == "bf16":  # beside FP32 masters
        draft.add(*_STATES)
    elif habits(draft).states_in_bf16:
        draft.add(*_STATES)
        if "--megatron-fsdp-main-params-dtype" not in draft.argv:
            draft.note(
                "Adam of BF16 weights without masters: projected with masters of 16 more bits"
            )


_NEMO_1 = "NeMo 1.x"


def expert_tensor_parallel(draft: Draft) -> int:
    """Ranks that share an expert.

    NeMo 1.x has no such knob (NVIDIA/dgxc-benchmarking grok1/grok1_314b.yaml names none): then
    Megatron-Core shards an expert over tp.
    """
    parallelism = draft.run["parallelism"]
    if _NEMO_1 in draft.framework:
        draft.note("experts are sharded over tp: NeMo 1.x has no expert tensor parallel size")
        return parallelism["tp"]
    return parallelism.get("etp") or 1


def is_sync_free(draft: Draft) -> bool:
    """Whether Primus' sync-free mixture of experts was on.

    Its stage 1 fuses router and permutation and pads the tokens of an expert where they are
    quantized (AMD-AGI/Primus patches/args/rocm_arg_validation.py).
    """
    return int(draft.flag("sync_free_moe_stage") or 0) > 0


def permutation_is_fused(draft: Draft) -> bool:
    """Whether tokens are permuted by one kernel.

    Not with NeMo 1.x, whose Megatron-Core (0.9) had no such kernel.
    Primus' mixture-of-experts study turns it on with its sync-free stage 1 (examples/moe_package/
    run_deepseek_v2*.sh); the steps are cumulative, in the order of its tables.
    """
    if _NEMO_1 in draft.framework:
        return False
    told = draft.is_on("moe_permute_fusion")
    if is_sync_free(draft) or told is not None:
        return is_sync_free(draft) or bool(told)
    if "Primus-Turbo" not in draft.framework:
        return True
    step = str(draft.flag("cumulative_optimisations") or "")
    after = ("sync-free", "all", "VPP5") + (("CPU",) if arch_key(draft).endswith("lite") else ())
    return any(word in step for word in after)
