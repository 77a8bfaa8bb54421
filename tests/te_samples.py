"""Random small arguments for every operator of the Transformer Engine stand-in."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

Call = tuple[tuple[Any, ...], dict[str, Any]]
Sampler = Callable[[random.Random], Call]

SAMPLES: dict[str, Sampler] = {}
"""One sampler per operator (name with overload)."""

NO_REAL_ARITHMETIC = ("hadamard_transform", "split_quantize")
"""Operators whose CPU kernels refuse."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def sample(*names: str) -> Callable[[Callable[..., Call]], Callable[..., Call]]:
    """Declare a sampler; with several names it is called with the name as well."""

    def register(function: Callable[..., Call]) -> Callable[..., Call]:
        for name in names:
            many = len(names) > 1
            SAMPLES[name] = (lambda r, n=name: function(r, n)) if many else function
        return function

    return register


def normal(r: random.Random, *shape: int, dtype: Any = None) -> torch.Tensor:
    """Random values; one in two is a view with gaps where the shape allows it."""
    dtype = dtype or torch.float32
    if r.random() < 0.3 and len(shape) > 1:
        return torch.randn(*shape[:-1], 2 * shape[-1]).to(dtype)[..., ::2]
    return torch.randn(*shape).to(dtype)


def byte(*shape: int) -> torch.Tensor:
    return torch.randint(0, 100, shape, dtype=torch.uint8)


def lengths(r: random.Random, total_of: int, multiple: int) -> tuple[torch.Tensor, list[int]]:
    """Prefix sums of sequences and their lengths."""
    each = [multiple * r.randint(1, 3) for _ in range(total_of)]
    sums = [sum(each[:i]) for i in range(len(each) + 1)]
    return torch.tensor(sums, dtype=torch.int32), each


# --- activations ---------------------------------------------------------------------------------

_KINDS = ("gelu", "qgelu", "relu", "srelu", "silu", "glu", "geglu", "qgeglu", "reglu", "sreglu",
          "swiglu", "clamped_swiglu", "situglu")  # fmt: skip
_PARAMETERS = {"clamped_swiglu": [7.0, 1.702, 1.0], "situglu": [4.0, 25.0]}


def gradient_of(kind: str) -> str:
    return "clamped_dswiglu" if kind == "clamped_swiglu" else f"d{kind}"


def sink(r: random.Random, rows: int, cols: int) -> tuple[list[Any], dict[str, Any]]:
    """Buffers for a quantized output and the attributes that go with them."""
    scaling = r.choice(("tensor", "mxfp8", "block1d", "block2d"))
    one = torch.ones(1)
    if scaling == "tensor":
        buffers = [byte(rows, cols), one.clone(), byte(cols, rows), None, one.clone(), one.clone()]
    elif scaling == "mxfp8":
        scales = byte(-(-rows // 128) * 128, -(-cols // 128) * 4)
        other = byte(-(-rows // 128) * 4, -(-cols // 128) * 128)
        buffers = [byte(rows, cols), scales, byte(rows, cols), other, None, None]
    else:
        by_row, by_col = -(-rows // 128), -(-cols // 128)
        if scaling == "block2d":
            shapes = (by_row, -(-by_col // 4) * 4), (by_col, -(-by_row // 4) * 4)
        else:
            shapes = (by_col, -(-rows // 4) * 4), (by_row, -(-cols // 4) * 4)
        buffers = [
            byte(rows, cols), torch.zeros(shapes[0]), byte(cols, rows), torch.zeros(shapes[1]),
            None, None]  # fmt: skip
    element = r.choice(("fp8_e4m3", "fp8_e5m2"))
    return buffers, {"format": f"{element}/{scaling}", "pow2_scales": r.random() < 0.5,
                     "amax_epsilon": 0.0}  # fmt: skip


def _activation(kind: str) -> None:
    gated, params = kind.endswith("glu"), {"params": _PARAMETERS.get(kind, [])}

    def inputs(r: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = r.choice(FLOATS)
        rows, cols = 32 * r.randint(1, 3), 32 * r.randint(1, 3)
        return normal(r, rows, cols * (1 + gated), dtype=dtype), normal(r, rows, cols, dtype=dtype)

    def amax(r: random.Random) -> Any:
        return torch.zeros(1) if r.random() < 0.5 else None

    def forward(r: random.Random) -> Call:
        return (inputs(r)[0], amax(r)), params

    def forward_out(r: random.Random) -> Call:
        x, y = inputs(r)
        buffers, attrs = sink(r, *y.shape)
        return (x, *buffers), params | attrs

    def backward(r: random.Random) -> Call:
        x, y = inputs(r)
        return (y, x, amax(r)), params

    def backward_out(r: random.Random) -> Call:
        x, y = inputs(r)
        buffers, attrs = sink(r, *x.shape)
        return (y, x, *buffers), params | attrs

    gradient = gradient_of(kind)
    SAMPLES.update({kind: forward, f"{kind}.out": forward_out, gradient: backward,
                    f"{gradient}.out": backward_out})  # fmt: skip


for _kind in _KINDS:
    _activation(_kind)


# --- attention -----------------------------------------------------------------------------------


def _attention(r: random.Random) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """q, k, v with bias and softmax offset; sequences; attributes."""
    fmt = r.choice(("sbhd", "bshd", "thd"))
    batch, kv_heads, dim_qk, dim_v = (r.randint(1, 3) for _ in range(4))
    heads = kv_heads * r.randint(1, 2)
    cu, each = lengths(r, batch, 4)
    if fmt != "thd":
        each = [each[0]] * batch
        cu = torch.arange(batch + 1, dtype=torch.int32) * each[0]
    seq, dtype = max(each), r.choice(FLOATS[1:])
    sizes = {"s": seq, "b": batch, "t": sum(each)}

    def tensor(h: int, d: int) -> torch.Tensor:
        return normal(r, *(sizes[axis] for axis in fmt[:-2]), h, d, dtype=dtype)

    causal = r.random() < 0.5
    softmax = r.choice(("vanilla", "learnable"))
    biased = fmt != "thd" and r.random() < 0.5
    bias = torch.randn(r.choice((1, batch)), r.choice((1, heads)), seq, seq) if biased else None
    offset = None if softmax == "vanilla" else torch.randn(1, heads, 1, 1)
    attrs = {
        "qkv_layout": f"{fmt}_{fmt}_{fmt}", "o_format": fmt,
        "mask": ("padding_causal" if causal else "padding") if fmt == "thd"
        else ("causal" if causal else "no_mask"),
        "bias_type": "no_bias" if bias is None else "post_scale_bias", "softmax_type": softmax,
        "window": [2, 0] if causal and r.random() < 0.5 else ([-1, 0] if causal else [-1, -1]),
        "bottom_right": False, "causal": causal, "scale": 0.5, "dropout": 0.0, "batch": batch,
        "heads": heads, "kv_heads": kv_heads, "seq_q": seq, "seq_kv": seq, "dim_qk": dim_qk,
        "dim_v": dim_v,
    }  # fmt: skip
    qkv = [tensor(heads, dim_qk), tensor(kv_heads, dim_qk), tensor(kv_heads, dim_v)]
    padded = (cu, cu) if fmt == "thd" else (None, None)
    return [*qkv, bias, offset], [cu, cu.clone(), *padded], attrs


@sample("fused_attn_fwd")
def _attn_fwd(r: random.Random) -> Call:
    tensors, sequences, attrs = _attention(r)
    return (*tensors, *sequences), attrs | {"max_logit": r.random() < 0.5, "training": True}


@sample("fused_attn_bwd", "fused_attn_bwd.out")
def _attn_bwd(r: random.Random, name: str) -> Call:
    (q, k, v, bias, offset), sequences, attrs = _attention(r)
    fmt = attrs["o_format"]
    out = torch.randn(*q.shape[:-1], attrs["dim_v"]).to(q.dtype)
    shape = ([q.shape[0], attrs["heads"], 1] if fmt == "thd"
             else [attrs["batch"], attrs["heads"], attrs["seq_q"], 1])  # fmt: skip
    saved = (out, torch.randn_like(out), torch.randn(shape), torch.zeros(2, dtype=torch.int64))
    into = [torch.empty(t.shape, dtype=t.dtype) for t in (q, k, v)] if name.endswith("out") else []
    attrs |= {"do_format": fmt, "dqkv_layout": attrs["qkv_layout"], "deterministic": False}
    return (q, k, v, *saved, bias, offset, *sequences, *into), attrs


# --- casts and scales ----------------------------------------------------------------------------


@sample("quantize")
def _quantize(r: random.Random) -> Call:
    rows, cols = 32 * r.randint(1, 5), 32 * r.randint(1, 5)
    buffers, attrs = sink(r, rows, cols)
    return (normal(r, rows, cols), None, *buffers), attrs | {
        "hadamard": False, "stochastic_rounding": False}


@sample("compute_amax")
def _compute_amax(r: random.Random) -> Call:
    return (normal(r, 3, r.randint(1, 9)), [torch.zeros(1)]), {"kind": "plain"}


@sample("compute_scale")
def _compute_scale(r: random.Random) -> Call:
    return (torch.rand(1), torch.zeros(1)), {
        "element": "fp8_e4m3", "pow2_scales": r.random() < 0.5, "amax_epsilon": 0.0}


@sample("fp8_transpose")
def _fp8_transpose(r: random.Random) -> Call:
    a, b, c = (r.randint(1, 5) for _ in range(3))
    return (byte(a, b, c), byte(c, a, b)), {}


@sample("dequantize")
def _dequantize(r: random.Random) -> Call:
    rows, cols = 32 * r.randint(1, 5), 32 * r.randint(1, 5)
    (row, row_scale, col, col_scale, *_), attrs = sink(r, rows, cols)
    scaling, by_col = attrs["format"].partition("/")[2], r.random() < 0.5
    data, scale = (col, row_scale if col_scale is None else col_scale) if by_col else (
        row, row_scale)
    return (data, scale, None), {
        "format": attrs["format"], "columnwise": by_col,
        "transposed": by_col and scaling != "mxfp8", "shape": [rows, cols],
        "dtype": r.choice(FLOATS)}  # fmt: skip


@sample("group_amax")
def _group_amax(r: random.Random) -> Call:
    splits = [r.randint(0, 3) for _ in range(3)]
    return (normal(r, sum(splits), 4), [torch.zeros(1) for _ in splits]), {
        "splits": splits, "kind": "plain"}


@sample("multi_cast_transpose")
def _multi_cast_transpose(r: random.Random) -> Call:
    shapes = [(r.randint(1, 5), r.randint(1, 5)) for _ in range(2)]
    ones = [[torch.ones(1) for _ in shapes] for _ in range(3)]
    return (
        [normal(r, *s) for s in shapes], [byte(*s) for s in shapes],
        [byte(s[1], s[0]) for s in shapes], *ones,
    ), {"format": "fp8_e4m3/tensor"}  # fmt: skip


@sample("hadamard_transform")
def _hadamard(r: random.Random) -> Call:
    return (normal(r, 2, 16, 32, dtype=torch.bfloat16),), {}


@sample("split_quantize")
def _split_quantize(r: random.Random) -> Call:
    return (torch.randn(32, 32), [], [byte(16, 16)], [byte(128, 4)], [], []), {
        "format": "fp4_e2m1/nvfp4", "hadamard": True, "stochastic_rounding": False}


@sample("swizzle_scales")
def _swizzle(r: random.Random) -> Call:
    return (byte(128 * r.randint(1, 2), 4),), {"format": "fp8_e4m3/mxfp8"}


@sample("swizzle_scales_group")
def _swizzle_group(r: random.Random) -> Call:
    return ([byte(r.randint(1, 5), 4) for _ in range(r.randint(1, 3))],), {
        "format": "fp8_e4m3/mxfp8"}


@sample("block_scales_to_mxfp8")
def _block_to_mx(r: random.Random) -> Call:
    return (torch.randn(2, 4),), {"rows": 128, "cols": 8, "format": "fp8_e4m3/block1d"}


@sample("delayed_scaling_update")
def _delayed(r: random.Random) -> Call:
    counts = [r.randint(1, 4) for _ in range(2)]
    return (
        torch.rand(sum(counts)), [torch.rand(3, c) for c in counts], [torch.ones(c) for c in counts]
    ), {"algorithm": r.choice(("max", "most_recent")), "element": "fp8_e4m3", "margin": 0.0}


@sample("multi_tensor_compute_scale")
def _multi_scale(r: random.Random) -> Call:
    lists = [[torch.rand(1) for _ in range(3)] for _ in range(3)]
    return (torch.zeros(1, dtype=torch.int32), *lists), {
        "max_fp8": 448.0, "pow2_scales": True, "epsilon": 0.0}


@sample("multi_tensor_compute_scale_e8m0")
def _multi_e8m0(r: random.Random) -> Call:
    return ([torch.rand(4, 4)], [byte(4, 4)]), {}


def _shard(r: random.Random, h: int, w: int) -> dict[str, int]:
    return {"h": h, "w": w, "start_offset": r.randint(0, h * w - 8)}


@sample("fp8_block_partial_amax", "fp8_block_partial_cast")
def _block_partial(r: random.Random, name: str) -> Call:
    place = _shard(r, 6, 8)
    if name.endswith("amax"):
        return (torch.randn(8), torch.zeros(2, 2)), place | {"block": 4}
    return (torch.randn(8), byte(8), torch.ones(2, 2)), place | {"block": 4, "element": "fp8_e4m3"}


@sample("mxfp8_partial_amax", "mxfp8_partial_cast")
def _mx_partial(r: random.Random, name: str) -> Call:
    place = _shard(r, 64, 96)
    if name.endswith("amax"):
        return (torch.randn(8), torch.zeros(128, 4), torch.zeros(4, 128)), place
    return (torch.randn(8), byte(8), byte(8), byte(128, 4), byte(4, 128)), place


# --- matrix products -----------------------------------------------------------------------------


def _gemm_attributes(r: random.Random) -> tuple[dict[str, Any], list[torch.Tensor]]:
    m, n, k = (r.randint(1, 9) for _ in range(3))
    layout, dtype = r.choice(("TN", "NN", "NT")), r.choice(FLOATS)
    a = normal(r, *((n, k) if layout[0] == "T" else (k, n)), dtype=dtype)
    b = normal(r, *((k, m) if layout[1] == "T" else (m, k)), dtype=dtype)
    return {
        "layout": layout, "m": m, "n": n, "k": k, "a_format": "plain", "b_format": "plain",
        "a_transposed": False, "b_transposed": False, "out_dtype": r.choice((dtype, torch.float32)),
        "split_accumulator": False,
    }, [a, b]  # fmt: skip


@sample("gemm", "gemm.out")
def _gemm(r: random.Random, name: str) -> Call:
    attrs, (a, b) = _gemm_attributes(r)
    shape = [attrs["m"], attrs["n"]]
    grad = r.random() < 0.5
    gelu = r.random() < 0.3
    bias = normal(r, attrs["n"]) if not grad and r.random() < 0.5 else None
    gelu_in = normal(r, *shape) if grad and gelu else None
    attrs |= {"aux_dtype": torch.float32, "out_shape": shape, "gelu": gelu, "grad": grad,
              "bias_grad": grad and not gelu and r.random() < 0.5, "alpha": 1.0}  # fmt: skip
    into = []
    if name.endswith("out"):
        into = [torch.zeros(shape, dtype=attrs["out_dtype"])]
        attrs |= {"accumulate": r.random() < 0.5, "beta": 1.0}
    return (a, None, None, b, None, None, bias, gelu_in, *into), attrs


@sample("grouped_gemm")
def _grouped(r: random.Random) -> Call:
    n, k, m = r.randint(1, 5), r.randint(1, 5), [r.randint(0, 3) for _ in range(3)]
    nothing = [None] * 3
    out = [torch.empty(sum(m), n)]
    return (
        [torch.randn(n, k) for _ in m], nothing, nothing, [torch.randn(i, k) for i in m], nothing,
        nothing, [], out, [], [],
    ), {
        "layout": "TN", "m": m, "n": [n] * 3, "k": [k] * 3, "a_format": "plain",
        "b_format": "plain", "a_transposed": False, "b_transposed": False,
        "out_dtype": torch.float32, "single_output": True, "gelu": False, "grad": False,
        "accumulate": False, "split_accumulator": False,
    }  # fmt: skip


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
            (torch.randn(total, 2, 4), step, lse, half, cu),
            {"only_second_half": True, "packed": packed}),
        "thd_second_half_lse_correction": ((lse, half, cu), {"packed": packed}),
        "thd_read_second_half_lse": (
            (lse, cu), {"packed": packed, "length": total // 2 if packed else longest // 2}),
    }  # fmt: skip
    return calls[name]
