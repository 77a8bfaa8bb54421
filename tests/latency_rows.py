"""Rows for tests of the latency database, and a writer that can be killed."""

from __future__ import annotations

import sys
from pathlib import Path

from primus_ext.cost.latency_db import (
    Clock,
    Device,
    LatencyDatabase,
    Origin,
    Row,
    Source,
    Versions,
)
from primus_ext.trace import Family, Op, TensorSpec

CPU = Device(product="a CPU", kind="cpu", memory_bytes=2**34, units=2, threads=1)


def product(m: int, n: int = 64, k: int = 32, name: str = "aten.mm") -> Op:
    """A forward product in fp32."""
    attrs = {"m": m, "n": n, "k": k, "batch": 1, "layout": "tn", "accumulate": False,
             "dtype": "fp32", "out_dtype": "fp32"}  # fmt: skip
    return Op(
        name, Family.GEMM, (TensorSpec((m, k), "fp32"), TensorSpec((k, n), "fp32")),
        (TensorSpec((m, n), "fp32"),), 2 * m * n * k, 4 * (m * k + k * n + m * n),
        tuple(sorted(attrs.items())),
    )  # fmt: skip


def row(op: Op, *samples: float, device: Device = CPU, origin: Origin = Origin.MEASURED) -> Row:
    """A row of these samples, in seconds."""
    return Row(
        op=op,
        device=device,
        versions=Versions(torch="2.14", framework="none", driver="5"),
        source=Source(origin=origin, name="a test", license="none", note="synthetic"),
        samples=samples or (1e-3,),
        clock=Clock.BOOST,
        kernel=op.name,
        warmup=2,
        clock_hz=3e9,
        taken="2026-01-01T00:00:00+00:00",
    )


def write(path: Path, writer: int, batches: int, size: int) -> None:
    """Store batches of rows, and tell on standard output as soon as each is committed."""
    with LatencyDatabase(path) as database:
        for batch in range(batches):
            first = (writer * batches + batch) * size + 1
            database.add([row(product(first + i)) for i in range(size)])
            sys.stdout.write(f"{batch}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    write(Path(sys.argv[1]), *map(int, sys.argv[2:]))
