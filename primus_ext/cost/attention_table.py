"""Measured causal attention around a shape: what the formula misses there."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from primus_ext.cost import tables
from primus_ext.cost.gemm_table import Neighbour

NEIGHBOURS = 8
_NEAR = 0.25
"""Octaves within which neighbours weigh about the same."""
_HOPPER_AND_OLDER = ("a100_sxm", "h100_sxm", "h200_sxm")
_OTHER_KERNELS = (("attention", "trtllm"), ("mla", "sglang"))
"""There, kernels that training has no like of: TensorRT-LLM's own beside FlashAttention-3 and
cuDNN, and multi-latent attention with its projections absorbed (576 columns for 192)."""
_KEY_WEIGHT = 0.5
"""An octave of key heads changes the time less than one of batch, sequence or query heads."""


class AttentionTable:
    """Seconds of forward kernels by batch, sequence, query and key heads, at one head dimension."""

    def __init__(self, keys: Any, seconds: Any, source: str) -> None:
        """Hold measurements.

        Args:
            keys: ``[rows, 4]`` batch, sequence, heads, key heads (numpy).
            seconds: ``[rows]``.
            source: Name and version of the tables.
        """
        import numpy as np

        self._keys = keys
        self._logs = np.log2(keys)
        self._seconds = seconds
        self._source = source

    def near(
        self, batch: int, seq: int, heads: int, kv_heads: int,
        model: Callable[[int, int, int, int], float],
    ) -> Neighbour | None:  # fmt: skip
        """Measured over modelled, the nearest shapes weighing most.

        Args:
            batch: Sequences.
            seq: Tokens of each.
            heads: Query heads.
            kv_heads: Key heads.
            model: Modelled seconds of such a shape, in the conditions of the tables.
        """
        import numpy as np

        wanted = np.log2(np.array([batch, seq, heads, kv_heads], dtype=float))
        apart = (self._logs - wanted) * np.array([1.0, 1.0, 1.0, _KEY_WEIGHT])
        squared = (apart**2).sum(axis=1)
        nearest = np.argsort(squared, kind="stable")[:NEIGHBOURS]
        total = weights = 0.0
        for row in nearest.tolist():
            weight = 1.0 / (float(squared[row]) + _NEAR**2)
            shape = [int(v) for v in self._keys[row]]
            ratio = float(self._seconds[row]) / model(shape[0], shape[1], shape[2], shape[3])
            total, weights = total + weight * math.log(ratio), weights + weight
        octaves = float(np.abs(apart[nearest[0]]).max())
        return Neighbour(math.exp(total / weights), octaves, self._source)


def load(
    system: str, dim_qk: int, dim_v: int, without: tuple[str, ...] = ()
) -> AttentionTable | None:
    """The table of a product and head dimension, None where there is none.

    Args:
        system: Product as the tables call it.
        dim_qk: Head dimension of queries and keys.
        dim_v: Head dimension of values; 192 and 128 are those of multi-latent attention.
        without: Frameworks to leave out, for validation.
    """
    import numpy as np

    measured: dict[tuple[int, int, int, int], list[float]] = {}
    for framework, rows in rows_of(system, dim_qk, dim_v).items():
        if framework not in without:
            for key, seconds in rows.items():
                measured.setdefault(key, []).append(seconds)
    if not measured:
        return None
    keys = np.array(list(measured), dtype=float)
    seconds = np.array([np.median(values) for values in measured.values()])
    return AttentionTable(keys, seconds, tables.source() or "")


def rows_of(
    system: str, dim_qk: int, dim_v: int
) -> dict[str, dict[tuple[int, int, int, int], float]]:
    """Seconds by framework and (batch, sequence, heads, key heads): causal, no window, bf16.

    Kernels written in Triton are left out: training calls none of them where there is another.
    """
    latent = (dim_qk, dim_v) == (192, 128)
    family, table = ("mla", "context_mla_perf") if latent else (
        "attention", "context_attention_perf")  # fmt: skip
    if not latent and dim_qk != dim_v:
        return {}
    found = {}
    for framework, path in tables.files(system, family, table).items():
        if system in _HOPPER_AND_OLDER and (family, framework) in _OTHER_KERNELS:
            continue
        where = [("kv_cache_dtype", "=", "bfloat16"), ("isl", ">=", 256)]
        where.append(("mla_dtype" if latent else "attn_dtype", "=", "bfloat16"))
        names = ["batch_size", "isl", "num_heads", "latency", "kernel_source"]
        if not latent:
            names.append("num_key_value_heads")
            where.append(("head_dim", "=", dim_qk))
            if "window_size" in tables.names(path):
                where.append(("window_size", "=", 0))
        columns = tables.read(path, names, where)
        heads = columns["num_heads"]
        keys = zip(columns["batch_size"].tolist(), columns["isl"].tolist(), heads.tolist(),
                   columns.get("num_key_value_heads", heads).tolist(), strict=True)  # fmt: skip
        rows: dict[tuple[int, int, int, int], float] = {}
        for key, latency, kernel in zip(
            keys, columns["latency"].tolist(), columns["kernel_source"].tolist(), strict=True
        ):
            if latency > 0 and "triton" not in kernel:
                rows[key] = min(latency * 1e-3, rows.get(key, math.inf))
        found[framework] = rows
    return found
