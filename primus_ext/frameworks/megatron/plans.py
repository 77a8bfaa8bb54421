"""Read the plan of a job from Megatron's validated arguments and transformer config."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
from pathlib import Path
from typing import Any

from primus_ext import __version__
from primus_ext.emulate import no_te, virtual_cuda
from primus_ext.emulate.session import ProgramError, current
from primus_ext.frameworks.megatron import expert_skew, offloading, roles
from primus_ext.plan import (
    Batch,
    Model,
    Parallelism,
    Plan,
    Precision,
    ProgramRef,
    Recompute,
    is_packed,
)

_PACKAGES = ("torch", "megatron-core", "transformer-engine", "hydra-core")
_FLAGS = (
    "transformer_impl", "cross_entropy_loss_fusion", "cross_entropy_fusion_impl",
    "moe_token_dispatcher_type", "moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion",
    "moe_shared_expert_overlap", "overlap_moe_expert_parallel_comm", "tp_comm_overlap",
    "gradient_accumulation_fusion", "attention_backend", "use_megatron_fsdp", "use_torch_fsdp2",
    "cp_comm_type", "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split", "optimizer_cpu_offload", "fp8_param_gather",
    "use_precision_aware_optimizer", "data_parallel_sharding_strategy",
    "align_grad_reduce", "align_param_gather", "microbatch_group_size_per_vp_stage",
    "num_distributed_optimizer_instances", "delay_wgrad_compute", "cuda_graph_impl",
    "optimizer_offload_fraction", "cpu_offloading_num_layers",
    "fine_grained_activation_offloading", "hybrid_layer_pattern", "sft",
    "dataloader_inter_document_masking",
)  # fmt: skip
# Variables of the user's command: where torch puts tensors, whether the host waits for kernels.
_ENVIRONMENT = (
    "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF",
    "CUBLAS_WORKSPACE_CONFIG", "HIPBLAS_WORKSPACE_CONFIG", "ROCBLAS_WORKSPACE_CONFIG",
    "CUDA_LAUNCH_BLOCKING", "HIP_LAUNCH_BLOCKING",
)  # fmt: skip


def arguments() -> Any:
    """Megatron's global, validated arguments."""
    from megatron.training import get_args

    return get_args()


def transformer_config(cfg_container: Any) -> Any:
    """The transformer config of the model that the program builds."""
    from megatron.core.transformer import TransformerConfig

    model = getattr(cfg_container, "model", None)
    for candidate in (model, getattr(model, "transformer", None)):
        if isinstance(candidate, TransformerConfig):
            return candidate
    from megatron.training.arguments import core_transformer_config_from_args

    return core_transformer_config_from_args(arguments())


def read(args: Any, config: Any) -> Plan:
    """The plan of the job.

    Args:
        args: Validated Megatron arguments.
        config: Its transformer config.
    """
    parallelism = _parallelism(args, config)
    recorded = current().request.get("routing") is not None
    skew = expert_skew.asked()
    if skew is not None:
        expert_skew.require_legal(skew, config)
    return Plan(
        model=_model(args, config),
        parallelism=parallelism,
        batch=Batch(
            mbs=args.micro_batch_size,
            gbs=args.global_batch_size,
            seq=args.seq_length,
            dp=parallelism.dp,
        ),
        precision=_precision(args),
        recompute=Recompute(
            granularity=args.recompute_granularity or "none",
            method=args.recompute_method or "",
            num_layers=args.recompute_num_layers or 0,
            modules=tuple(config.recompute_modules or ())
            if args.recompute_granularity == "selective"
            else (),
        ),
        optimizer=args.optimizer,
        schedule="interleaved" if parallelism.vpp > 1 else "1f1b",
        flags={
            name: getattr(args, name)
            for name in _FLAGS
            if isinstance(getattr(args, name, None), (bool, int, float, str))
        }
        | {"transformer_engine_absent": _stood_in(), "recorded_routing": recorded}
        | ({} if skew is None else {"expert_skew": skew})
        | {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
    )


def _stood_in() -> bool:
    """Whether layers of ours stand for Transformer Engine's."""
    return no_te.absent() and not virtual_cuda.is_host(current().request["device"])


def _parallelism(args: Any, config: Any) -> Parallelism:
    pp, vpp = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size or 1
    return Parallelism(
        world_size=args.world_size,
        tp=args.tensor_model_parallel_size,
        pp=pp,
        vpp=vpp,
        cp=args.context_parallel_size,
        ep=args.expert_model_parallel_size,
        etp=args.expert_tensor_parallel_size or args.tensor_model_parallel_size,
        sequence_parallel=args.sequence_parallel,
        distributed_optimizer=args.use_distributed_optimizer,
        overlap_grad_reduce=args.overlap_grad_reduce,
        overlap_param_gather=args.overlap_param_gather,
        overlap_p2p=bool(config.overlap_p2p_comm),
        layers_per_stage=tuple(
            tuple(len(roles.chunk_layers(config, stage, chunk)) for chunk in range(vpp))
            for stage in range(pp)
        ),
    )


def _precision(args: Any) -> Precision:
    params = "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"
    compute, recipe = params, ""
    if args.fp8:
        compute, recipe = "fp8", str(args.fp8_recipe)
    if getattr(args, "fp4", None):
        compute, recipe = "fp4", str(args.fp4_recipe)
    grads = "fp32" if args.accumulate_allreduce_grads_in_fp32 else params
    return Precision(compute=compute, recipe=recipe, params=params, grads=grads)


def _model(args: Any, config: Any) -> Model:
    return Model(
        name=str(current().request.get("name", "")),
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.ffn_hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_query_groups or config.num_attention_heads,
        head_dim=config.kv_channels,
        vocab_size=args.vocab_size or args.padded_vocab_size,
        num_experts=config.num_moe_experts or 0,
        topk=config.moe_router_topk if config.num_moe_experts else 0,
        moe_ffn_hidden_size=(config.moe_ffn_hidden_size or 0) if config.num_moe_experts else 0,
        mtp_layers=config.mtp_num_layers or 0,
        framework_class=type(config).__name__,
    )


_UNSUPPORTED = {
    "nccl_ub": "memory pools that are registered with NCCL",
    "optimizer_cuda_graph": "the memory pools that CUDA graphs keep",
}


def refuse_unsupported(args: Any) -> None:
    """Refuse by name what would be composed wrongly.

    Raises:
        ProgramError: an option that this version does not project is on.
    """
    for name, words in _UNSUPPORTED.items():
        if getattr(args, name, False):
            raise ProgramError(
                f"{name}=True can't be projected by this version, which has no model of {words}; "
                f"legal: {name}=False"
            )
    stages = args.pipeline_model_parallel_size
    if args.use_megatron_fsdp and stages > 1:
        raise ProgramError(
            f"pipeline_model_parallel_size={stages} is not legal with use_megatron_fsdp=True: "
            "Megatron-FSDP shards over all ranks but those of tp and ep, so it must be 1"
        )
    refuse_partly_supported(args)


def refuse_partly_supported(args: Any) -> None:
    """Refuse values and combinations by name.

    Raises:
        ProgramError: one of them is asked for.
    """
    offloading.refuse_unsupported(args)
    if args.position_embedding_type == "mrope":
        raise ProgramError(
            "position_embedding_type=mrope can't be projected by this version: its positions "
            "come with images; legal: learned_absolute, rope, yarn, relative, none"
        )
    if is_packed(vars(args)) and args.hybrid_layer_pattern is not None:
        name = "sft" if args.sft else "dataloader_inter_document_masking"
        raise ProgramError(
            f"{name}=True with hybrid_layer_pattern={args.hybrid_layer_pattern} can't be projected "
            f"by this version: Mamba layers on packed documents are not emulated; legal: "
            f"{name}=False"
        )
    if args.optimizer == "adaptive_muon":
        raise ProgramError(
            "optimizer=adaptive_muon can't be projected: megatron-core 0.19's class fails with "
            "emerging-optimizers 0.3; legal: adam, sgd, muon, lion, soap"
        )


def require_format(plan: Plan, request: dict[str, Any]) -> None:
    """Refuse a precision that the target lacks, before anything is built.

    Args:
        plan: The job.
        request: The session's; ``formats`` are those the target computes in.

    Raises:
        ProgramError: the target lacks it.
    """
    needed, offered = plan.precision.number_format, request.get("formats")
    if offered is not None and needed not in offered:
        raise ProgramError(
            f"precision={needed} is not available on {request['device']['name']}: it computes in "
            f"{', '.join(offered)}"
        )


def program(request: dict[str, Any]) -> ProgramRef:
    """The program that a plan came from: its command, the hash of its script, versions."""
    script = Path(request["cwd"]) / (request.get("script") or "")
    code = script.read_bytes() if script.is_file() else b""
    return ProgramRef(
        argv=(request.get("script") or f"-m {request['module']}", *request["args"]),
        cwd=request["cwd"],
        code_sha256=hashlib.sha256(code).hexdigest(),
        versions=versions(),
    )


def versions() -> dict[str, str]:
    """Releases of this package and of what it runs, ``absent`` where one is not installed."""
    found = {"primus-ext": __version__}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "absent"
    return found
