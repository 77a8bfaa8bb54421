"""Published runs whose parameters were sharded over the data-parallel ranks, as Megatron runs it.

Torch FSDP (1 and 2), DeepSpeed's ZeRO-3 and MaxText's FSDP become torch FSDP2; Megatron-FSDP stays
what it is.  Megatron runs torch FSDP2 without expert parallelism, which NeMo AutoModel has beside
it; that becomes Megatron-FSDP.  Where Megatron can't shard parameters the run becomes a distributed
optimizer.
"""

from __future__ import annotations

from typing import Any

_FSDP2 = (
    "--use-cpu-initialization",
    "--use-torch-fsdp2", "--ckpt-format", "torch_dist", "--no-gradient-accumulation-fusion",
    "--untie-embeddings-and-output-weights",
)  # fmt: skip
_MEGATRON_FSDP = (
    "--use-megatron-fsdp", "--data-parallel-sharding-strategy", "optim_grads_params",
    "--ckpt-format", "fsdp_dtensor", "--use-distributed-optimizer",
    "--no-gradient-accumulation-fusion",
)  # fmt: skip
_EXPERTS = "expert parallelism"


def is_sharded(parallelism: dict[str, Any]) -> bool:
    """Whether parameters were sharded over the data-parallel ranks."""
    return bool(parallelism.get("fsdp")) or (parallelism.get("zero_stage") or 0) > 1


def arguments(run: dict[str, Any], notes: list[str]) -> list[str] | None:
    """Megatron arguments of the sharding; None where Megatron can't shard parameters.

    Args:
        run: The published run.
        notes: Approximations made are appended.
    """
    parallelism = run["parallelism"]
    stated = parallelism.get("fsdp")
    details = stated if isinstance(stated, dict) else {}
    if "megatron" in str(details.get("kind")):
        return [*_MEGATRON_FSDP, *_instances(parallelism, details)]
    refused = _refused(run)
    if refused == _EXPERTS and "AutoModel" in str(run.get("software", {}).get("framework")):
        notes.append(
            "FSDP2 with experts beside it as Megatron-FSDP without FP32 parameters: torch FSDP2 "
            f"has no {refused} in Megatron"
        )
        return [*_MEGATRON_FSDP, "--megatron-fsdp-main-params-dtype", "auto"]
    if refused:
        notes.append(
            f"FSDP projected as a distributed optimizer (parameters not sharded): "
            f"torch FSDP2 has no {refused} in Megatron"
        )
        return None
    argv: list[str] = list(_FSDP2)
    if "SHARD_GRAD_OP" in str(details.get("strategy")) or parallelism.get("zero_stage") == 2:
        argv.append("--torch-fsdp2-no-reshard-after-forward")
    framework = str(run.get("software", {}).get("framework") or run["source"]["name"])
    if not framework.startswith(("Primus", "Megatron")):
        notes.append(
            "FSDP2 as Megatron runs it: bf16 parameters and gradients, FP32 main parameters"
        )
    if run["model"].get("tied_embeddings"):
        notes.append("embeddings untied: Megatron's FSDP2 wants it")
    group = details.get("shard_group")
    if group is not None and group < parallelism["dp"] * (parallelism.get("cp") or 1):
        notes.append(f"sharded over all data-parallel ranks, not over groups of {group}")
    return argv


def _instances(parallelism: dict[str, Any], details: dict[str, Any]) -> list[str]:
    """Groups that shard among themselves (HSDP)."""
    ranks = parallelism["dp"] * (parallelism.get("cp") or 1)
    instances = ranks // (details.get("shard_group") or ranks)
    if instances < 2:
        return []
    return ["--num-distributed-optimizer-instances", str(instances)]


def _refused(run: dict[str, Any]) -> str:
    """What of the run Megatron refuses together with torch FSDP2; '' if nothing."""
    parallelism = run["parallelism"]
    if (parallelism.get("pp") or 1) > 1:
        return "pipeline parallelism"
    if (parallelism.get("ep") or 1) > 1:
        return _EXPERTS
    return "fp16" if run["precision"]["compute"] == "fp16" else ""
