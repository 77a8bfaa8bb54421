"""The model: sizes, attention, norms, activation, positions."""

from __future__ import annotations

from typing import Any

from primus_ext.frameworks.published.draft import Draft, NotProjectable

# What distinguishes a family beyond its sizes, as its published configuration has it (model cards
# and config.json of the checkpoints; NeMo and Megatron-Bridge recipes of the same names).
_FAMILIES: dict[str, tuple[str, ...]] = {
    "qwen3": ("--qk-layernorm",),
    "deepseek": ("--qk-layernorm",),
    "gpt-oss": (
        "--add-qkv-bias", "--softmax-type", "learnable", "--window-size", "128,0",
        "--window-attn-skip-freq", "2", "--glu-linear-offset", "1.0",
        "--activation-func-clamp-value", "7.0", "--no-bias-dropout-fusion",
    ),
    # GPT-OSS as AMD-AGI/Primus has it (fd1eeab primus/configs/models/megatron/gpt_oss_120B.yaml)
    "primus-gpt-oss": ("--qk-layernorm", "--softmax-type", "learnable"),
    "nemotron4": ("--apply-layernorm-1p", "--rotary-percent", "0.5"),
}  # fmt: skip
_WITH_BIAS = ("gpt3", "gpt-oss")
_ACTIVATIONS = {
    "swiglu": ("--swiglu",),
    "geglu": ("--swiglu",),
    "squared_relu": ("--squared-relu",),
    "gelu": (),
}


def write(draft: Draft) -> None:
    """Arguments of the dense part of the model.

    Raises:
        NotProjectable: the architecture is not stated, or there is no Megatron argument for it.
    """
    model, family = draft.run["model"], arch_key(draft)
    _sizes(draft, model)
    for name, words in _FAMILIES.items():
        if family.startswith(name):
            draft.add(*_without_window(words) if draft.flag("sliding_window") is False else words)
    _activation(draft, model, family)
    norm = "RMSNorm" if model.get("gated_mlp") else "LayerNorm"
    draft.add("--normalization", norm)
    biased = family.startswith(_WITH_BIAS) or (not family and not model.get("gated_mlp"))
    if not biased or "no bias" in str(model.get("norm", "")):
        draft.add("--disable-bias-linear")
    _attention(draft, model)
    _positions(draft, model, family)
    if not (model.get("tied_embeddings") or family.startswith("gpt3")):
        draft.add("--untie-embeddings-and-output-weights")
    if model.get("embedding_layernorm"):
        draft.note("the norm of the embedding is left out")
    if model.get("mtp_layers"):
        draft.add("--mtp-num-layers", model["mtp_layers"])


def arch_key(draft: Draft) -> str:
    """Short name of the architecture, e.g. ``deepseek-v3``; '' where the file has none."""
    return str(draft.run["model"].get("arch_key") or "")


def _sizes(draft: Draft, model: dict[str, Any]) -> None:
    if not model.get("num_layers") or not model.get("vocab_size") or not model.get("hidden_size"):
        raise NotProjectable("the architecture is not stated")
    batch = draft.run["batch"]
    draft.add(
        "--num-layers", model["num_layers"],
        "--hidden-size", model["hidden_size"],
        "--ffn-hidden-size", model.get("ffn_hidden_size") or model["moe_ffn_hidden_size"],
        "--num-attention-heads", model["num_heads"],
        "--max-position-embeddings", draft.stated(batch, "seq_len"),
        "--vocab-size", model["vocab_size"],
        "--make-vocab-size-divisible-by", "128",
        "--attention-dropout", draft.flag("dropout") or 0,
        "--hidden-dropout", draft.flag("dropout") or 0,
    )  # fmt: skip


def _without_window(words: tuple[str, ...]) -> list[str]:
    """Arguments of a family whose sliding window was turned off."""
    values = {i + 1 for i, word in enumerate(words) if word.startswith("--window")}
    return [w for i, w in enumerate(words) if not w.startswith("--window") and i not in values]


def _activation(draft: Draft, model: dict[str, Any], family: str) -> None:
    activation = model.get("activation") or ("swiglu" if model.get("gated_mlp") else "gelu")
    if activation not in _ACTIVATIONS:
        raise NotProjectable(f"activation {activation} has no Megatron argument")
    if family.startswith("gpt-oss"):
        draft.add("--quick-geglu")  # its clamped, shifted form is in the arguments of the family
        return
    if draft.is_on("bias_swiglu_fusion") is False:
        draft.add("--no-bias-swiglu-fusion")
    if activation == "geglu":
        draft.note("GEGLU projected as SwiGLU (the same sizes; both are one kernel)")
    draft.add(*_ACTIVATIONS[activation])


def _attention(draft: Draft, model: dict[str, Any]) -> None:
    mla = model.get("mla")
    if mla:
        draft.add("--multi-latent-attention")
        if mla.get("q_lora_rank"):
            draft.add("--q-lora-rank", mla["q_lora_rank"])
        draft.add(
            "--kv-lora-rank", mla["kv_lora_rank"],
            "--qk-head-dim", mla["qk_nope_head_dim"],
            "--qk-pos-emb-head-dim", mla["qk_rope_head_dim"],
            "--v-head-dim", mla["v_head_dim"],
            "--rotary-scaling-factor", "1",
        )  # fmt: skip
        return
    draft.add("--kv-channels", model["head_dim"])
    if model.get("num_kv_heads", model["num_heads"]) != model["num_heads"]:
        draft.add("--group-query-attention", "--num-query-groups", model["num_kv_heads"])


def _positions(draft: Draft, model: dict[str, Any], family: str) -> None:
    position = str(model.get("position") or "")
    if position.startswith("learned") or family.startswith("gpt3"):
        if not draft.flag("dropout"):
            draft.note("dropout is left out")
    elif position.startswith("alibi"):
        draft.add("--position-embedding-type", "none")
        draft.note("ALiBi is left out (a bias added to the attention scores)")
    else:
        draft.add("--position-embedding-type", "rope")
        if not position:
            draft.note("rotary positions assumed")
