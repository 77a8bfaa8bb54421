"""From a dispatched op to a priced kind of work: family, FLOPs, bytes and the numbers that matter.

One place knows the argument order of every op; an op that is not known is memory-bound work over
its inputs and outputs, which is right for the element-wise kernels that make up the long tail.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_iter

from primus_ext.observe import (
    classify_c10d,
    classify_deep_ep,
    classify_fsdp,
    classify_functional,
    classify_mamba,
    classify_te,
)
from primus_ext.observe.specs import attention_op, dtype_name, gemm_op, moved_bytes, spec
from primus_ext.trace import Family, Op

if TYPE_CHECKING:
    from primus_ext.observe.recorder import Recorder

# Allocation, metadata and host synchronisation: no device kernel.
_NO_KERNEL = {
    "aten.empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty",
    "aten.new_empty_strided", "aten.detach", "aten.alias", "aten.set_", "aten.resize_",
    "aten._local_scalar_dense", "aten.lift_fresh", "aten.is_pinned", "aten._pin_memory",
    "aten.record_stream", "aten.sym_size", "aten.equal", "aten._unsafe_view",
    "aten._reshape_alias", "aten.view", "aten._to_copy.alias",
}  # fmt: skip
# The destination is only written.
_WRITES_FIRST = {"aten.copy_", "aten.fill_", "aten.zero_", "aten._foreach_copy_"}
# Elements above the diagonal are not read, and written as zeros.
_CAUSAL_SOFTMAX = {"te_softmax.scaled_upper_triang_masked_softmax_fwd",
                   "te_softmax.scaled_upper_triang_masked_softmax_bwd"}  # fmt: skip
# Only the gathered or scattered rows move, not the whole table.
_GATHERS = {"aten.embedding", "aten.index_select", "aten.index", "aten.gather"}
_SCATTERS = {"aten.scatter_add_", "aten.scatter_add", "aten.index_add_", "aten.index_add",
             "aten.index_put_", "aten.scatter_", "aten.scatter"}  # fmt: skip


def op_name(func: Any) -> str:
    """``aten.mm`` from the overload packet."""
    return f"{func.namespace}.{func._schema.name.split('::')[1]}"


@functools.cache
def is_idle(func: Any) -> bool:
    """Whether the device does nothing, whatever the arguments."""
    return op_name(func) in _NO_KERNEL


def memory_op(name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> Op:
    """A kernel that reads its inputs and writes its outputs once."""
    return Op(
        name=name,
        family=Family.MEMORY,
        inputs=tuple(spec(t) for t in inputs),
        outputs=tuple(spec(t) for t in outputs),
        flops=0,
        bytes=moved_bytes(inputs) + moved_bytes(outputs),
    )


def classify(
    func: Any, args: tuple, kwargs: dict, produced: list[torch.Tensor], recorder: Recorder
) -> Op | None:
    """The op behind one dispatch, or None if the device does nothing."""
    name = op_name(func)
    if is_idle(func):
        return None
    if func.namespace == "_c10d_functional":
        return classify_functional.classify(name, args, produced, recorder)
    if func.namespace == "c10d":
        return classify_c10d.classify(name, func, args, kwargs, recorder)
    if func.namespace == "primus_deep_ep":
        return classify_deep_ep.classify(name, func, args, kwargs, produced, recorder)
    if func.namespace in ("primus_te", "primus_flash"):
        return classify_te.classify(name, func, args, kwargs, produced)
    if func.namespace == "fsdp":
        return classify_fsdp.classify(name, func, args, kwargs)
    if func.namespace == "primus_mamba":
        return classify_mamba.classify(name, func, args, kwargs)
    if name == "aten.baddbmm" and kwargs.get("beta") == 0:  # the first argument is not read
        return _mm(name, args[1], args[2], produced[0], False)
    gemm = _GEMMS.get(name)
    if gemm is not None:
        return gemm(name, args, produced[0] if produced else None)
    read = [t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)]
    if not produced:
        return None
    if name in _CAUSAL_SOFTMAX:
        return _traffic(name, read, produced, moved_bytes(read) // 2 + moved_bytes(produced))
    if name in _WRITES_FIRST:
        return memory_op(name, read[1:], produced[:1])
    if name in _GATHERS:
        indices = read[1:]
        return _traffic(name, read, produced, 2 * moved_bytes(produced) + moved_bytes(indices))
    if name in _SCATTERS:
        return _traffic(name, read, produced, 3 * moved_bytes(read[-1:]) + moved_bytes(read[1:-1]))
    if name.startswith("aten._scaled_dot_product_"):
        return _torch_attention(name, func, args, kwargs, read, produced)
    return memory_op(name, read, produced)


def _torch_attention(
    name: str, func: Any, args: tuple, kwargs: dict, read: list[torch.Tensor],
    produced: list[torch.Tensor],
) -> Op:  # fmt: skip
    """Torch's own fused attention, ``[batch, heads, seq, dim]``, forward or backward."""
    by_name = classify_te.arguments(func, args, kwargs)
    query, key, value = (by_name[n] for n in ("query", "key", "value"))
    batch, heads, seq_q, dim_qk = query.shape
    return attention_op(
        name, read, produced, batch=batch, heads=heads, kv_heads=key.shape[1], seq_q=seq_q,
        seq_kv=key.shape[2], dim_qk=dim_qk, dim_v=value.shape[3],
        causal=bool(by_name.get("is_causal", False)), window=(-1, -1),
        direction="backward" if "backward" in name else "forward",
        dtype=dtype_name(query.dtype),
    )  # fmt: skip


def _traffic(name: str, read: list[torch.Tensor], made: list[torch.Tensor], size: int) -> Op:
    return Op(
        name=name,
        family=Family.MEMORY,
        inputs=tuple(spec(t) for t in read),
        outputs=tuple(spec(t) for t in made),
        flops=0,
        bytes=size,
    )


def _is_transposed(matrix: torch.Tensor) -> bool:
    return matrix.stride(-2) == 1 and matrix.stride(-1) != 1


def _layout(a: torch.Tensor, b: torch.Tensor) -> str:
    # BLAS names: y = x W^T is tn, the input gradient nn, the weight gradient nt.
    return {(False, True): "tn", (False, False): "nn", (True, False): "nt"}.get(
        (_is_transposed(a), _is_transposed(b)), "tt"
    )


def _mm(name: str, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, accumulate: bool) -> Op:
    batch = a.shape[0] if a.dim() == 3 else 1
    return gemm_op(
        name, [a, b], [out], m=a.shape[-2], n=b.shape[-1], k=a.shape[-1], batch=batch,
        layout=_layout(a, b), accumulate=accumulate,
    )  # fmt: skip


def _wgrad(name: str, args: tuple, out: Any) -> Op:
    data, grads, main_grad = args
    tokens = data.numel() // data.shape[-1]
    return gemm_op(
        name, [data, grads], [main_grad], m=grads.shape[-1], n=data.shape[-1], k=tokens,
        layout="nt", accumulate=True,
    )  # fmt: skip


_GEMMS = {
    "primus_apex.wgrad_gemm_accum": _wgrad,
    "aten.mm": lambda name, args, out: _mm(name, args[0], args[1], out, False),
    "aten.bmm": lambda name, args, out: _mm(name, args[0], args[1], out, False),
    "aten.addmm": lambda name, args, out: _mm(name, args[1], args[2], out, False),
    "aten.baddbmm": lambda name, args, out: _mm(name, args[1], args[2], out, True),
}
