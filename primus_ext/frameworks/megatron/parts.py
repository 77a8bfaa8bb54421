"""Parts of a Megatron model and how its parameters count."""

from __future__ import annotations

from typing import Any

from torch import nn

from primus_ext.observe.scopes import Part
from primus_ext.trace import ScopeKind

_LAYERS = {
    "TransformerLayer", "MoETransformerLayer", "MambaLayer", "HyperConnectionTransformerLayer",
}  # fmt: skip
_OUTPUT = {"final_layernorm", "final_norm", "output_layer"}


def _is_layer(module: nn.Module) -> bool:
    return any(base.__name__ in _LAYERS for base in type(module).__mro__)


def _layer_kind(module: nn.Module) -> ScopeKind:
    """Layers of hybrid models have a mixer, attention or an MLP alone."""
    if hasattr(module, "mixer"):
        return ScopeKind.MAMBA_LAYER
    if any(hasattr(inner, "router") for inner in module.children()):
        return ScopeKind.MOE_LAYER
    attends = _is_real(getattr(module, "self_attention", None))
    transforms = _is_real(getattr(module, "mlp", None))
    if attends and transforms:
        return ScopeKind.DENSE_LAYER
    return ScopeKind.ATTENTION_LAYER if attends else ScopeKind.MLP_LAYER


def _is_real(module: nn.Module | None) -> bool:
    """Not left out of the layer."""
    return module is not None and type(module).__name__ not in ("IdentityOp", "IdentityFuncOp")


def parts(chunk: nn.Module) -> list[Part]:
    """Embedding, layers, final norm and output layer of an (unwrapped) model chunk."""
    found: list[Part] = []

    def walk(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            full = f"{path}.{name}" if path else name
            if full == "embedding":
                found.append((ScopeKind.EMBEDDING, full, child))
            elif _is_layer(child):
                kind = ScopeKind.MTP_LAYER if full.startswith("mtp") else _layer_kind(child)
                found.append((kind, full, child))
            elif name in _OUTPUT:
                found.append((ScopeKind.OUTPUT, full, child))
            else:
                walk(child, full)

    walk(chunk, "")
    return found


def counts(chunks: list[nn.Module], args: Any, config: Any) -> tuple[int, int, int]:
    """Elements of a rank's parameters, of its stage over all ranks, and those a token uses.

    Args:
        chunks: Unwrapped model chunks of the rank.
        args: Validated Megatron arguments.
        config: Transformer config.

    Returns:
        Elements on this rank as the module holds them; elements of the stage with tp, ep and etp
        shards put together, without vocabulary padding and without copies of another stage's
        weights; of these, what one token passes through (top-k of the routed experts).
    """
    local = total = 0
    active = 0.0
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            local += parameter.numel()
            if getattr(parameter, "shared", False):  # a copy of the first stage's embedding
                continue
            expert = ".experts." in name and "shared_experts" not in name
            whole = parameter.numel() * _shards(parameter, expert, args)
            if name.endswith(("word_embeddings.weight", "output_layer.weight")):
                vocab = args.vocab_size or args.padded_vocab_size
                whole = whole // args.padded_vocab_size * min(vocab, args.padded_vocab_size)
            total += whole
            share = config.moe_router_topk / config.num_moe_experts if expert else 1.0
            active += whole * share
    return local, total, round(active)


def _shards(parameter: nn.Parameter, expert: bool, args: Any) -> int:
    """Over how many ranks the parameter is split."""
    if expert:
        etp = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
        return args.expert_model_parallel_size * etp
    if getattr(parameter, "tensor_model_parallel", False):
        return args.tensor_model_parallel_size
    return 1
