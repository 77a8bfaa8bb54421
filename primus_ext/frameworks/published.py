"""A published, measured run as the nearest Megatron program, and what had to be assumed.

The schema of a run is that of a runs file: ``hardware``, ``model``, ``parallelism``, ``batch``,
``precision``, ``recompute``, ``flags``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

# Products in runs files, and the accelerator that stands for each.
ACCELERATORS = {
    "A100-80GB-SXM": "a100",
    "H100-80GB-SXM": "h100",
    "H200-141GB-SXM": "h200",
    "B200-180GB": "b200",
    "MI300X": "mi300x",
    "MI325X": "mi325x",
    "MI355X": "mi355x",
}
_FP8_RECIPES = {
    "delayed": "delayed",
    "current": "tensorwise",
    "tensorwise": "tensorwise",
    "blockwise": "blockwise",
    "mxfp8": "mxfp8",
}


class NotProjectable(ValueError):
    """The run can't be projected; the message says why."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PublishedProgram:
    """Megatron arguments of a run, its target, and the approximations made."""

    argv: tuple[str, ...]
    accelerator: str
    nodes: int
    gpus_per_node: int
    approximations: tuple[str, ...]


def program(run: dict[str, Any]) -> PublishedProgram:
    """The nearest Megatron program of a run.

    Raises:
        NotProjectable: an accelerator, architecture or option that is not supported.
    """
    hardware, notes = run["hardware"], []
    accelerator = ACCELERATORS.get(hardware["gpu"])
    if accelerator is None:
        raise NotProjectable(f"accelerator {hardware['gpu']} has no data")
    per_node = min(hardware["gpus_per_node"], hardware["num_gpus"])
    if hardware["num_gpus"] % per_node:
        raise NotProjectable(f"{hardware['num_gpus']} GPUs don't fill nodes of {per_node}")
    argv = [
        *_model(run["model"], run["batch"], notes),
        *_degrees(run["parallelism"], run["flags"], notes),
        *_batch(run["batch"]),
        *_precision(run["precision"], notes),
        *_recompute(run["recompute"], notes),
        *_options(run["flags"], run["parallelism"], notes),
    ]
    return PublishedProgram(
        argv=tuple(argv),
        accelerator=accelerator,
        nodes=hardware["num_gpus"] // per_node,
        gpus_per_node=per_node,
        approximations=tuple(notes),
    )


def _model(model: dict[str, Any], batch: dict[str, Any], notes: list[str]) -> list[str]:
    if model.get("num_experts") or model.get("mla"):
        raise NotProjectable("mixture-of-experts and MLA runs are not mapped yet")
    if not model.get("num_layers") or not model.get("vocab_size"):
        raise NotProjectable("the architecture is not stated")
    argv = [
        "--num-layers", str(model["num_layers"]),
        "--hidden-size", str(model["hidden_size"]),
        "--ffn-hidden-size", str(model["ffn_hidden_size"]),
        "--num-attention-heads", str(model["num_heads"]),
        "--kv-channels", str(model["head_dim"]),
        "--max-position-embeddings", str(batch["seq_len"]),
        "--vocab-size", str(model["vocab_size"]),
        "--make-vocab-size-divisible-by", "128",
        "--attention-dropout", "0", "--hidden-dropout", "0",
    ]  # fmt: skip
    if model.get("num_kv_heads", model["num_heads"]) != model["num_heads"]:
        argv += ["--group-query-attention", "--num-query-groups", str(model["num_kv_heads"])]
    if model.get("gated_mlp"):
        argv += ["--swiglu", "--disable-bias-linear", "--normalization", "RMSNorm"]
    if model.get("position") == "learned":
        notes.append("dropout is left out")
    else:
        argv += ["--position-embedding-type", "rope"]
        notes.append("rotary positions assumed" if "position" not in model else "rotary positions")
    if not model.get("tied_embeddings"):
        argv += ["--untie-embeddings-and-output-weights"]
    return argv


def _degrees(
    parallelism: dict[str, Any], flags: dict[str, Any], notes: list[str]
) -> list[str]:
    tp, pp, vpp = parallelism["tp"], parallelism["pp"], parallelism.get("vpp") or 1
    argv = [
        "--tensor-model-parallel-size", str(tp),
        "--pipeline-model-parallel-size", str(pp),
        "--context-parallel-size", str(parallelism.get("cp") or 1),
    ]  # fmt: skip
    if vpp > 1:
        argv += ["--num-virtual-stages-per-pipeline-rank", str(vpp)]
    if parallelism.get("sequence_parallel") and tp > 1:
        argv.append("--sequence-parallel")
    if parallelism.get("distributed_optimizer") or parallelism.get("fsdp"):
        argv += ["--use-distributed-optimizer"]
        if flags.get("overlap_grad_reduce", True):
            argv += ["--overlap-grad-reduce", "--overlap-param-gather"]
    if parallelism.get("fsdp"):
        notes.append("FSDP projected as a distributed optimizer (parameters not sharded)")
    return argv


def _batch(batch: dict[str, Any]) -> list[str]:
    return [
        "--micro-batch-size", str(batch["mbs"]),
        "--global-batch-size", str(batch["gbs"]),
        "--seq-length", str(batch["seq_len"]),
    ]  # fmt: skip


def _precision(precision: dict[str, Any], notes: list[str]) -> list[str]:
    compute = precision["compute"]
    if compute in ("bf16", "fp16"):
        return [f"--{compute}"]
    if compute != "fp8":
        raise NotProjectable(f"precision {compute} is not mapped yet")
    label = str(precision.get("recipe") or "").lower()
    recipe = next((r for word, r in _FP8_RECIPES.items() if word in label), None)
    if recipe is None:
        recipe = "tensorwise"
        notes.append("FP8 recipe not stated: current scaling assumed")
    return ["--bf16", "--fp8-format", "hybrid", "--fp8-recipe", recipe]


def _recompute(recompute: dict[str, Any], notes: list[str]) -> list[str]:
    granularity = recompute.get("granularity")
    if granularity == "full":
        method = recompute.get("method") or "uniform"
        layers = recompute.get("num_layers") or 1
        return ["--recompute-granularity", "full", "--recompute-method", method,
                "--recompute-num-layers", str(layers)]  # fmt: skip
    if granularity == "selective":
        return ["--recompute-granularity", "selective"]
    if granularity is None:
        notes.append("recompute not stated: none assumed")
    return []


def _options(
    flags: dict[str, Any], parallelism: dict[str, Any], notes: list[str]
) -> list[str]:
    argv = [
        "--transformer-impl", "transformer_engine", "--mock-data",
        "--tokenizer-type", "NullTokenizer", "--train-iters", "10", "--lr", "1e-4",
        "--no-check-for-nan-in-loss-and-grad",
    ]  # fmt: skip
    if flags.get("flash_attention") is False:
        argv += ["--attention-backend", "unfused"]
    else:
        argv += ["--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "native"]
        if flags.get("cross_entropy_fusion") == "TE":
            notes.append("Megatron's fused cross entropy (0.19 refuses Transformer Engine's)")
    return argv
