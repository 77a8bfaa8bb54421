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
    kind = r.choice(("plain", "hadamard"))
    rows = 16 if kind == "hadamard" else 3
    buffers = [torch.zeros(1) for _ in range(r.randint(1, 2))]
    return (normal(r, rows, r.randint(1, 9)), buffers), {"kind": kind}


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
    splits = [16 * r.randint(1, 3) for _ in range(2)]
    x, by_col = normal(r, sum(splits), 32), r.random() < 0.5
    rows = [[byte(n, 16) for n in splits], [byte(128, 4) for _ in splits]]
    cols = [[byte(32, n // 2) for n in splits], [byte(128, 4) for _ in splits]]
    return (x, [], *(rows if r.random() < 0.5 or not by_col else ([], [])),
            *(cols if by_col else ([], []))), {
        "format": "fp4_e2m1/nvfp4", "hadamard": by_col, "stochastic_rounding": False}


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
