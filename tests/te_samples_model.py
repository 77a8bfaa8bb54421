"""More samples: mixture of experts, optimizers, norms, rope, softmax and packed sequences."""

from __future__ import annotations

import random
from typing import Any

import torch

from tests.te_samples import FLOATS, Call, byte, lengths, normal, sample

# --- mixture of experts --------------------------------------------------------------------------


def _permutation(r: random.Random) -> tuple[int, int, torch.Tensor]:
    tokens, topk = r.randint(1, 6), r.randint(1, 3)
    return tokens, topk, torch.randint(0, 4, (tokens, topk), dtype=torch.int32)


@sample("moe_permute")
def _permute(r: random.Random) -> Call:
    tokens, topk, indices = _permutation(r)
    x = normal(r, tokens, 4, dtype=r.choice(FLOATS))
    return (x, indices), {"num_out_tokens": tokens * topk}


@sample("moe_unpermute", "moe_unpermute_bwd")
def _unpermute(r: random.Random, name: str) -> Call:
    tokens, topk, _ = _permutation(r)
    rows, dtype = torch.randperm(tokens * topk).to(torch.int32), r.choice(FLOATS)
    x, prob = normal(r, tokens * topk, 4, dtype=dtype), torch.rand(tokens, topk)
    attrs = {"tokens": tokens, "topk": topk}
    if not name.endswith("bwd"):
        return (x, rows, prob), attrs
    return (normal(r, tokens, 4, dtype=dtype), x, rows, prob), attrs


@sample("multi_row_padding")
def _padding(r: random.Random) -> Call:
    rows = [r.randint(0, 5) for _ in range(3)]
    padded = [-(-i // 4) * 4 for i in rows]
    pad = r.random() < 0.5
    x, out = torch.randn(sum(rows), 4), torch.randn(sum(padded), 4)
    return (x, out) if pad else (out, x), {"rows": rows, "padded_rows": padded, "pad": pad}


_SCORES = ("softmax", "sigmoid", "sqrtsoftplus")


@sample("fused_topk_router_fwd", "fused_topk_router_bwd", "fused_aux_scores_fwd",
        "fused_aux_scores_bwd")  # fmt: skip
def _router(r: random.Random, name: str) -> Call:
    rows, experts, dtype = r.randint(1, 6), 8, r.choice(FLOATS)
    logits, function = normal(r, rows, experts, dtype=dtype), r.choice(_SCORES)
    attrs: dict[str, Any] = {"topk": r.randint(1, 3), "score_function": function}
    if name.startswith("fused_topk"):
        attrs |= {"pre_softmax": r.random() < 0.5, "scaling": 2.0}
    saved, upstream = torch.rand(rows, experts), normal(r, rows, experts, dtype=dtype)
    if name == "fused_aux_scores_fwd":
        return (logits,), attrs
    if name == "fused_aux_scores_bwd":
        return (saved, upstream.float(), torch.empty(rows, experts, dtype=dtype)), attrs
    if name.endswith("fwd"):
        return (logits, None), attrs | {"groups": -1, "group_topk": -1}
    mask = torch.rand(rows, experts) < 0.3
    return (mask, saved, upstream, torch.empty(rows, experts, dtype=dtype)), attrs


@sample("fused_aux_loss_fwd", "fused_aux_loss_bwd")
def _aux_loss(r: random.Random, name: str) -> Call:
    rows, experts, dtype = r.randint(1, 6), 4, r.choice(FLOATS)
    counts = torch.randint(0, 9, (experts,))
    if name.endswith("fwd"):
        return (normal(r, rows, experts, dtype=dtype), counts, None), {
            "tokens": 6.0, "experts": experts, "topk": 2, "coeff": 0.1}
    grad = torch.randn(()).to(dtype)
    return (torch.rand(2), counts, grad), {"rows": rows, "cols": experts}


# --- optimizers ----------------------------------------------------------------------------------

_NOOP = torch.zeros(1, dtype=torch.int32)
_ADAM = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "mode": 1, "bias_correction": True,
         "weight_decay": 0.1}  # fmt: skip


def _lists(r: random.Random, *dtypes: Any) -> list[list[torch.Tensor]]:
    shapes = [(r.randint(1, 5), 3), (r.randint(1, 5),)]
    return [[torch.rand(s).to(dtype) for s in shapes] for dtype in dtypes]


@sample("multi_tensor_adam")
def _adam(r: random.Random) -> Call:
    low, f32 = r.choice(FLOATS), torch.float32
    return (_NOOP, *_lists(r, f32, low, f32, f32, f32)), _ADAM | {"lr": 0.1, "step": 2}


@sample("multi_tensor_adam_capturable")
def _adam_capturable(r: random.Random) -> Call:
    lists = _lists(r, *[torch.float32] * 4)
    tail = (torch.tensor(0.1), torch.tensor([2]), torch.tensor([1.0]))
    return (_NOOP, *lists, [], *tail), dict(_ADAM)


@sample("multi_tensor_adam_param_remainder")
def _adam_remainder(r: random.Random) -> Call:
    f32 = torch.float32
    lists = _lists(r, f32, torch.bfloat16, f32, f32, torch.int16)
    return (_NOOP, *lists), _ADAM | {"lr": 0.1, "step": 2}


@sample("multi_tensor_adam_fp8")
def _adam_fp8(r: random.Random) -> Call:
    f32 = torch.float32
    lists = _lists(r, f32, torch.uint8, f32, f32, f32)
    scales = [[torch.ones(1) for _ in lists[0]] for _ in range(3)]
    return (_NOOP, *lists, *scales), _ADAM | {"lr": 0.1, "step": 2, "element": "fp8_e4m3"}


@sample("multi_tensor_sgd")
def _sgd(r: random.Random) -> Call:
    return (_NOOP, *_lists(r, *[torch.float32] * 3), []), {
        "wd": 0.1, "momentum": 0.9, "dampening": 0.0, "lr": 0.1, "nesterov": False,
        "first_run": True, "wd_after_momentum": False, "scale": 1.0}  # fmt: skip


@sample("multi_tensor_l2norm")
def _l2norm(r: random.Random) -> Call:
    tensors = _lists(r, r.choice(FLOATS))[0]
    return (_NOOP, tensors, None, torch.zeros(320)), {"per_tensor": r.random() < 0.5}


@sample("multi_tensor_scale")
def _scale(r: random.Random) -> Call:
    return (_NOOP.clone(), *_lists(r, torch.bfloat16, torch.float32), None), {"scale": 0.5}


# --- norms ---------------------------------------------------------------------------------------


@sample("rmsnorm_fwd", "layernorm_fwd", "rmsnorm_fwd.out", "layernorm_fwd.out")
def _norm_fwd(r: random.Random, name: str) -> Call:
    rows, cols, dtype = r.randint(1, 5), r.randint(1, 9), r.choice(FLOATS)
    x = normal(r, 2, rows, cols, dtype=dtype)
    inputs = [x, torch.randn(cols), *([torch.randn(cols)] if name.startswith("layer") else [])]
    attrs = {"eps": 1e-5, "zero_centered_gamma": r.random() < 0.5}
    if not name.endswith("out"):
        amax = torch.zeros(1) if r.random() < 0.5 else None
        return (*inputs, amax), attrs | {"out_dtype": r.choice(FLOATS)}
    if r.random() < 0.5:
        return (*inputs, torch.empty(x.shape), None, None, None), attrs | {"out_format": "plain"}
    one = torch.ones(1)
    return (*inputs, byte(*x.shape), one, one.clone(), one.clone()), attrs | {
        "out_format": "fp8_e4m3"}


@sample("rmsnorm_bwd", "rmsnorm_bwd_add", "layernorm_bwd")
def _norm_bwd(r: random.Random, name: str) -> Call:
    rows, cols, dtype = r.randint(1, 5), r.randint(1, 9), r.choice(FLOATS)
    dz, x, add = (normal(r, 2, rows, cols, dtype=dtype) for _ in range(3))
    sigma, gamma = torch.rand(2 * rows), torch.randn(cols).to(r.choice(FLOATS))
    middle = {"rmsnorm_bwd": [], "rmsnorm_bwd_add": [add], "layernorm_bwd": [torch.rand(2 * rows)]}
    return (dz, x, *middle[name], sigma, gamma), {"zero_centered_gamma": r.random() < 0.5}


# --- rope and softmax ----------------------------------------------------------------------------


def _rope_attributes(r: random.Random, fmt: str) -> dict[str, Any]:
    return {"fmt": fmt, "interleaved": r.random() < 0.5, "cp_size": r.choice((1, 2)), "cp_rank": 0}


@sample("fused_rope_fwd", "fused_rope_bwd")
def _rope(r: random.Random, _: str) -> Call:
    fmt = r.choice(("sbhd", "bshd", "thd"))
    attrs = _rope_attributes(r, fmt)
    cu, each = lengths(r, 2, 4)
    local = [size // attrs["cp_size"] for size in each]
    sizes = {"s": local[0], "b": 2, "t": sum(local)}
    x = normal(r, *(sizes[axis] for axis in fmt[:-2]), 2, 8, dtype=r.choice(FLOATS))
    if r.random() < 0.5 and fmt != "thd":  # heads and dims of a slice: strides are kept apart
        x = torch.randn(*x.shape[:-2], 4, 8)[..., 1:3, :]
    return (x, torch.randn(24, 1, 1, r.choice((4, 8))), None, cu if fmt == "thd" else None), attrs


@sample("fused_qkv_rope_fwd", "fused_qkv_rope_bwd")
def _qkv_rope(r: random.Random, name: str) -> Call:
    fmt, groups, width = r.choice(("sbhd", "bshd")), r.randint(1, 2), 8
    per_group = r.randint(1, 2)
    split, lead = [per_group * width, width, width], (4, 2) if fmt == "sbhd" else (2, 4)
    freqs = torch.randn(24, 1, 1, width)
    attrs = _rope_attributes(r, fmt) | {"split": split}
    if name.endswith("fwd"):
        return (torch.randn(*lead, groups, sum(split)), freqs, freqs, None), attrs
    gradients = [torch.randn(*lead, groups * i, width) for i in (per_group, 1, 1)]
    return (*gradients, freqs, freqs), attrs


@sample("scaled_softmax_fwd", "scaled_softmax_bwd")
def _softmax(r: random.Random, name: str) -> Call:
    b, h, s, dtype = r.randint(1, 2), r.randint(1, 3), r.randint(1, 6), r.choice(FLOATS[1:])
    x = normal(r, b, h, s, s, dtype=dtype)
    if name.endswith("bwd"):
        return (x, normal(r, b, h, s, s, dtype=dtype)), {"scale": 0.5}
    kind = r.choice(("full", "masked", "upper_triangle", "aligned_causal"))
    mask = torch.rand(b, 1, s, s) < 0.3 if kind == "masked" else None
    return (x, mask), {"scale": 0.5, "kind": kind}


# --- packed sequences ----------------------------------------------------------------------------


@sample("thd_read_half_tensor", "thd_get_partitioned_indices", "thd_reorder",
        "thd_copy_valid_tokens", "convert_thd_to_bshd", "convert_bshd_to_thd",
        "thd_grad_correction", "thd_out_correction", "thd_second_half_lse_correction",
        "thd_read_second_half_lse")  # fmt: skip
def _thd(r: random.Random, name: str) -> Call:
    cu, each = lengths(r, 2, 8)
    total, longest = sum(each), max(each)
    x = normal(r, total, 2, 4, dtype=r.choice(FLOATS))
    packed = r.random() < 0.5
    lse = torch.randn(2, total) if packed else torch.randn(2, 2, longest)
    half = torch.randn(2, total // 2) if packed else torch.randn(2, 2, longest // 2)
    step = torch.randn(total // 2, 2, 4)
    calls: dict[str, Call] = {
        "thd_read_half_tensor": ((x, cu), {"half": r.randint(0, 1)}),
        "thd_get_partitioned_indices": ((cu,), {"tokens": total, "world": 2, "rank": 1}),
        "thd_reorder": ((x, cu), {"cp_size": 2, "to_sequence_order": r.random() < 0.5}),
        "thd_copy_valid_tokens": ((torch.zeros(total, 2), torch.randn(total, 2), cu, cu), {}),
        "convert_thd_to_bshd": ((x, cu), {"batch": 2, "length": longest}),
        "convert_bshd_to_thd": ((torch.randn(2, longest, 3), cu), {"tokens": total}),
        "thd_grad_correction": (
            (torch.randn(total, 2, 4), torch.randn(total, 2, 4), cu),
            {"first_half": "add", "second_half": "copy"}),
        "thd_out_correction": (
            (torch.randn(total, 2, 4), step, lse - 0.5, lse, half, cu),
            {"only_second_half": True, "packed": packed}),
        "thd_second_half_lse_correction": ((lse, half, cu), {"packed": packed}),
        "thd_read_second_half_lse": (
            (lse, cu), {"packed": packed, "length": total // 2 if packed else longest // 2}),
    }  # fmt: skip
    return calls[name]
