"""Rows from the measured tables of the optional package ``aiconfigurator-core``.

Dense products (bf16 and block-scaled FP8) and causal forwards in bf16 of the newest version of each
serving framework.  Left out: modules of several kernels (experts, latent attention with its
projections), and per-tensor FP8 and NVFP4, whose timed calls quantise as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from primus_ext.cost import tables
from primus_ext.cost.latency_db import evidence, work
from primus_ext.cost.latency_db.rows import Clock, Device, Origin, Row, Source, Versions
from primus_ext.cost.latency_db.store import DatabaseError
from primus_ext.trace import Op

_FORMATS = {"bfloat16": "bf16", "fp8_block": "fp8_e4m3/block2d"}
_LICENSE = "Apache-2.0"


def read(system: str, accelerator: str) -> Iterator[Row]:
    """Rows of one product.

    Args:
        system: As the tables call it.
        accelerator: Our name for it.

    Raises:
        DatabaseError: The tables are not installed, or have nothing of the product.
    """
    if tables.source() is None:
        raise DatabaseError(
            "aiconfigurator-core and pyarrow are not installed: pip install 'primus_ext[tables]'"
        )
    products = tables.files(system, "gemm", "gemm_perf") if system else {}
    attention = tables.files(system, "attention", "context_attention_perf") if system else {}
    if not products and not attention:
        raise DatabaseError(f"{tables.source()} has no tables of {accelerator}")
    for framework, path in products.items():
        for columns in _tuples(path, ["gemm_dtype", "m", "n", "k"], [("latency", ">", 0.0)]):
            dtype, m, n, k, kernel, product, version, latency = columns
            if dtype in _FORMATS and latency > 0:
                op = work.product(int(m), int(n), int(k), _FORMATS[dtype])
                yield _row(op, latency, framework, kernel, product, version, accelerator, path)
    for framework, path in attention.items():
        yield from _forwards(framework, path, accelerator)


def _forwards(framework: str, path: Path, accelerator: str) -> Iterator[Row]:
    where: list[tuple[str, str, Any]] = [
        ("attn_dtype", "=", "bfloat16"),
        ("kv_cache_dtype", "=", "bfloat16"),
    ]
    if "window_size" in tables.names(path):
        where.append(("window_size", "=", 0))
    names = ["batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim"]
    for columns in _tuples(path, names, where):
        batch, seq, heads, kv_heads, dim, kernel, product, version, latency = columns
        if latency > 0:
            op = work.attention(
                int(batch), int(seq), int(heads), int(kv_heads), int(dim), int(dim), causal=True
            )
            yield _row(op, latency, framework, kernel, product, version, accelerator, path)


def _tuples(path: Path, names: list[str], where: list[tuple[str, str, Any]]) -> Iterator[tuple]:
    every = [*names, "kernel_source", "device", "version", "latency"]
    columns = tables.read(path, every, where)
    yield from zip(*(columns[name].tolist() for name in every), strict=True)


def _row(
    op: Op, milliseconds: float, framework: str, kernel: str, product: str, version: str,
    accelerator: str, path: Path,
) -> Row:  # fmt: skip
    return Row(
        op=op,
        device=Device(product=str(product), kind="gpu", accelerator=accelerator),
        versions=Versions(framework=f"{framework} {version}"),
        source=Source(
            origin=Origin.IMPORTED,
            name=f"{tables.source()}: {'/'.join(path.parts[-5:])}",
            license=_LICENSE,
            note=f"CUDA graph replay; {evidence.CAVEAT}",
        ),
        samples=(milliseconds * 1e-3,),
        clock=Clock.BOOST,
        kernel=str(kernel),
    )
