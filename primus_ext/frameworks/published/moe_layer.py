"""Rows of Megatron-LM's benchmark of one mixture-of-experts layer as cases to emulate."""

from __future__ import annotations

from typing import Any

from primus_ext.frameworks.published.draft import NotProjectable

MODULE = "primus_ext.frameworks.megatron.moe_layer"
"""What runs a case; its first argument is the case as JSON."""
_DISPATCHERS = {"a2a": "alltoall", "deepep": "flex", "hybridep": "flex"}


def case(row: dict[str, Any]) -> dict[str, Any]:
    """The case of a row: ``seq_length``, ``micro_batch_size``, ``dtype``, ``config``.

    ``config`` is what ``moe_perf/__main__.py`` passes (Megatron-LM d98e8a6).  It passes no shared
    expert, even where the case names one, and neither an activation nor a gate: GELU.

    Raises:
        NotProjectable: a dispatcher or precision that the benchmark has not.
    """
    model, degrees = row["model"], row["parallelism"]
    dispatcher, precision = str(row["dispatcher"]), str(row["precision"])
    if dispatcher not in _DISPATCHERS or precision not in ("bf16", "fp8 blockwise"):
        raise NotProjectable(f"{dispatcher} in {precision} is no case of the benchmark")
    config: dict[str, Any] = {
        "hidden_size": model["hidden_size"],
        "moe_ffn_hidden_size": model["moe_ffn_hidden_size"],
        "num_attention_heads": model["num_attention_heads"],
        "num_moe_experts": model["num_experts"],
        "moe_router_topk": model["topk"],
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 1.0,
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": _DISPATCHERS[dispatcher],
        "moe_permute_fusion": True,
        "moe_router_fusion": True,
        "moe_router_force_load_balancing": True,
        "add_bias_linear": False,
        "tensor_model_parallel_size": degrees["tp"],
        "expert_model_parallel_size": degrees["ep"],
        "expert_tensor_parallel_size": degrees["etp"],
    }
    if dispatcher != "a2a":
        config["moe_flex_dispatcher_backend"] = dispatcher
    if "sigmoid" in str(model.get("router")):
        config |= {
            "moe_router_score_function": "sigmoid",
            "moe_router_num_groups": 8,
            "moe_router_group_topk": 4,
            "moe_router_enable_expert_bias": True,
        }
    if precision != "bf16":
        config |= {"fp8": "hybrid", "fp8_recipe": "blockwise"}
    return {
        "seq_length": model["seq_len"],
        "micro_batch_size": model["mbs"],
        "dtype": "bfloat16",
        "config": config,
    }


def routing(row: dict[str, Any]) -> dict[str, Any]:
    """Token counts of the case, as a request's ``routing`` takes them.

    The benchmark routes at random: every expert gets about the same number of tokens, but none
    that kernels are made for.  Counts one off the mean, up and down in turn, are such: quantized
    experts then pad their tokens, as they do there.
    """
    model = row["model"]
    mean = model["seq_len"] * model["topk"] // model["num_experts"]
    counts = [mean + (-1) ** expert for expert in range(model["num_experts"])]
    return {"tokens": model["seq_len"], "layers": {"None": counts}}
