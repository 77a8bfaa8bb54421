"""Imported figures: what a point says was timed, where it is from, and what is left out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from primus_ext.cli import main
from primus_ext.cost import tables
from primus_ext.cost.latency_db import Clock, LatencyDatabase, Origin, Row
from primus_ext.trace import Family

EVIDENCE = """
sources:
  bench: {repo: a/b, commit: 0123456789, path: x.md, licence: MIT, note: cold cache}
  slow: {url: https://example.org/y, note: 30 s per shape}
points:
- {gpu: MI300X, op: gemm, shape: 'm=512,n=1024,k=256', dtype: bf16, dir: fwd, value: 100.0,
   unit: TFLOP/s, us: 2.5, src: bench, sw: hipBLASLt 1, conf: measured}
- {gpu: H100-SXM, op: gemm, shape: m=n=k=4096, dtype: fp8, dir: fwd, value: 1000.0,
   unit: TFLOP/s, src: slow, conf: measured, clock_mhz: 1500}
- {gpu: 'MI350X|MI355X', op: gemm, shape: 'm=8,n=16,k=32,layout=NT,accumulate=1,out=fp32',
   dtype: bf16, dir: wgrad, value: 1.0, unit: TFLOP/s, src: bench, conf: measured}
- {gpu: B200, op: grouped_gemm, shape: 'groups=4,m_per_group=128,n=512,k=256', dtype: bf16,
   dir: dgrad, value: 100.0, unit: TFLOP/s, src: bench, conf: measured}
- {gpu: B200, op: attention, shape: 'b=2,s=1024,hq=8,hkv=2,d=64,causal=1', dtype: bf16, dir: bwd,
   value: 100.0, unit: TFLOP/s, src: bench, conf: measured}
- {gpu: B200, op: gemm, shape: m=n=k=64, dtype: bf16, dir: fwd, value: 9.0, unit: TFLOP/s,
   src: bench, conf: memory(unverified)}
- {gpu: B200, op: all_reduce, shape: 1024 B, dtype: fp32, dir: '-', value: 9.0, unit: GB/s busbw,
   src: bench, conf: measured}
- {gpu: B200, op: gemm, shape: m=n=k=64, dtype: int8, dir: fwd, value: 9.0, unit: TFLOP/s,
   src: bench, conf: measured}
"""


def taken_in(tmp_path: Path, *arguments: str) -> list[Row]:
    path = tmp_path / "a.sqlite"
    assert main(["db", "import", "--db", str(path), *arguments]) == 0
    with LatencyDatabase(path, create=False) as database:
        return list(database.rows())


def test_figures_become_the_ops_they_say_with_their_source(tmp_path: Path, capsys) -> None:
    file = tmp_path / "figures.yaml"
    file.write_text(EVIDENCE)
    product, fp8, gradient, grouped, attention = taken_in(tmp_path, str(file))
    said = capsys.readouterr().out
    assert "5 rows read, 5 of them new" in said and said.count("1 left out") == 3

    assert product.samples == (pytest.approx(2.5e-6),)
    assert product.op.flops == 2 * 512 * 1024 * 256
    assert product.op.bytes == 2 * (512 * 256 + 1024 * 256 + 512 * 1024)
    assert product.device.accelerator == "mi300x" and product.versions.framework == "hipBLASLt 1"
    assert product.source.origin is Origin.IMPORTED and product.source.license == "MIT"
    assert product.source.name == "figures.yaml: a/b 0123456 x.md"
    assert product.clock is Clock.BOOST and "boost clock" in product.source.note

    assert fp8.samples == (pytest.approx(2 * 4096**3 / 1e15),)
    assert fp8.clock is Clock.SUSTAINED and fp8.clock_hz == 1.5e9
    assert "boost clock" not in fp8.source.note

    assert gradient.device.accelerator == ""  # two products: none of ours
    assert dict(gradient.op.attrs)["layout"] == "nt" and gradient.op.attr("accumulate") is True
    assert gradient.op.bytes == 2 * (8 * 32 + 16 * 32) + 2 * 4 * 8 * 16

    assert grouped.op.family is Family.GROUPED_GEMM
    wanted = {"m": 4 * 128, "n": 256, "k": 512, "groups": 4, "layout": "nn"}
    assert {name: grouped.op.attr(name) for name in wanted} == wanted
    assert grouped.op.flops == 2 * 4 * 128 * 512 * 256

    pairs = 1024 * 1025 // 2
    assert attention.op.flops == 2 * 2 * 8 * pairs * 5 * 64
    assert attention.samples == (pytest.approx(attention.op.flops / 1e14),)
    assert taken_in(tmp_path, str(file)) == [product, fp8, gradient, grouped, attention]


def test_files_that_are_no_figures_are_refused(tmp_path: Path, capsys) -> None:
    file = tmp_path / "figures.yaml"
    file.write_text("models: []")
    database = str(tmp_path / "a.sqlite")
    assert main(["db", "import", "--db", database, str(file)]) == 2
    assert "no list named points" in capsys.readouterr().err
    assert main(["db", "import", "--db", database, "aiconfigurator-core"]) == 2
    assert "--accelerator" in capsys.readouterr().err


def test_measured_tables_are_read_by_product(tmp_path: Path, monkeypatch) -> None:
    products = {
        "gemm_dtype": ["bfloat16", "fp8", "fp8_block", "bfloat16"], "m": [8, 8, 8, 8],
        "n": [16, 16, 16, 16], "k": [32, 32, 32, 64], "latency": [0.5, 1.0, 0.25, 0.0],
    }  # fmt: skip
    attention = {"batch_size": [2], "isl": [128], "num_heads": [8], "num_key_value_heads": [4],
                 "head_dim": [64], "latency": [0.125]}  # fmt: skip
    common = {"kernel_source": "k", "device": "H100", "version": "1.2"}

    def files(system: str, family: str, table: str) -> dict[str, Path]:
        assert system == "h100_sxm"
        return {"vllm": Path(f"data/{system}/{family}/vllm/1.2/{table}.parquet")}

    def read(path: Path, columns: list[str], where: list) -> dict[str, np.ndarray]:
        found = attention if "attention" in path.name else products
        count = len(found["latency"])
        return {name: np.array(found.get(name, [common.get(name)] * count)) for name in columns}

    monkeypatch.setattr(tables, "source", lambda: "aiconfigurator-core 0")
    monkeypatch.setattr(tables, "files", files)
    monkeypatch.setattr(tables, "read", read)
    monkeypatch.setattr(tables, "names", lambda path: ["window_size"])
    rows = taken_in(tmp_path, "aiconfigurator-core", "--accelerator", "h100")
    assert [row.samples for row in rows] == [(0.5e-3,), (0.25e-3,), (0.125e-3,)]
    assert [row.op.attr("dtype") for row in rows] == ["bf16", "fp8_e4m3/block2d", "bf16"]
    for row in rows:
        assert row.clock is Clock.BOOST and row.device.accelerator == "h100"
        assert row.source.license == "Apache-2.0" and "vllm/1.2" in row.source.name
        assert row.versions.framework == "vllm 1.2" and "boost clock" in row.source.note
