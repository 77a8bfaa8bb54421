"""``primus-ext db missing`` and ``measure`` on a small model."""

from __future__ import annotations

from pathlib import Path

import pytest

from primus_ext.cli import main
from primus_ext.cost.latency_db import LatencyDatabase, Origin, signature
from primus_ext.cost.latency_db.prices import Prices
from primus_ext.runner import configurations, database_fill
from primus_ext.runner.configurations import Needs
from primus_ext.runner.database_fill import Filled
from primus_ext.runner.microbench import Microbench
from primus_ext.runner.outcome import UsageError
from primus_ext.trace import Family, Op, TensorSpec
from tests.latency_rows import product

MODELS = """
common: >-
  --mock-data --tokenizer-type NullTokenizer --train-iters 10 --lr 1e-4 --transformer-impl local
  --no-persist-layer-norm --no-masked-softmax-fusion --no-gradient-accumulation-fusion
  --attention-dropout 0 --hidden-dropout 0 --use-distributed-optimizer --micro-batch-size 1
  --position-embedding-type rope --global-batch-size 8 --seq-length 64
  --max-position-embeddings 512 --num-layers 1 --swiglu --disable-bias-linear
models:
- name: tiny
  arguments: >-
    --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --vocab-size 512
  gpus: 2
  unit: 16
  mbs: [1, 2]
  seq: [64]
  degrees: [{tensor_model_parallel_size: 1}, {tensor_model_parallel_size: 2},
            {tensor_model_parallel_size: 3}]
"""


def test_files_of_models_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    for text, words in (
        ("[1]", "no list named models"),
        ("models: [{name: a}]", "a model has the keys"),
        (MODELS.replace("unit: 16", "unit: many"), "'tiny'"),
        (MODELS.replace("gpus: 2", "gpus: 2\n  colour: red"), "colour"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=words):
            configurations.read(path)
    with pytest.raises(UsageError, match="can't be read"):
        configurations.read(tmp_path / "none")
    path.write_text(MODELS)
    (model,) = configurations.read(path)
    assert model.arguments[-2:] == ("--vocab-size", "512") and len(model.degrees) == 3


def test_the_shipped_list_has_twelve_models() -> None:
    root = Path(__file__).resolve().parents[1]
    models = configurations.read(root / "validation" / "latency_db_models.yaml")
    assert len({model.name for model in models}) == 12
    assert all(model.source for model in models)


def test_verdicts_do_not_end_a_run_and_what_is_there_is_not_measured_again(tmp_path: Path) -> None:
    huge = Op("aten.zero_", Family.MEMORY, (), (TensorSpec((1 << 45,), "fp32"),), 0, 1 << 47)
    unknown = Op("aten.unheard_of", Family.MEMORY, (TensorSpec((4,), "fp32"),), (), 0, 16)
    ops = {product(m, 64, k): 1 for m in (32, 64) for k in (32, 64)}
    needs = Needs({"a": ops | {huge: 1, unknown: 1}}, {}, {})  # pyright: ignore[reportArgumentType]

    def fill(everything: bool) -> Filled:
        with LatencyDatabase(tmp_path / "a.sqlite") as database, Microbench("cpu", 3) as bench:
            return database_fill.fill(
                database, bench, needs, everything=everything, progress=lambda *_: None
            )

    first = fill(everything=True)
    assert {row.op for row in first.rows} == {signature.canonical(op) for op in ops}
    assert str(1 << 47) in first.left["oom"][0] and "unheard_of" in first.left["refused"][0]
    assert first.device_s > 0
    assert fill(everything=True).rows == [] == fill(everything=False).rows


@pytest.mark.slow
def test_a_models_ops_are_measured_once_on_the_device_at_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIMUS_EXT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PRIMUS_EXT_DB", str(tmp_path / "a.sqlite"))
    models = tmp_path / "models.yaml"
    models.write_text(MODELS)
    asked = [str(models), "--device", "cpu"]
    assert main(["db", "measure", *asked, "--repetitions", "3"]) == 0
    said = capsys.readouterr().out
    assert "ops measured on" in said
    assert "not allowed: tiny tensor_model_parallel_size=3" in said
    assert main(["db", "missing", *asked]) == 0
    line = next(li for li in capsys.readouterr().out.splitlines() if li.startswith("gemm"))
    assert line.split()[-1] == "0"  # of the products none is missing
    with LatencyDatabase(tmp_path / "a.sqlite") as database:
        rows = list(database.rows(origin=Origin.MEASURED))
        prices = Prices(rows)
    needs = configurations.needs(configurations.read(models), "h100", lambda *_: None)
    assert len(needs.configurations) == 4  # two layouts, two microbatches
    wanted = {op for ops in needs.configurations.values() for op in ops}
    products = [op for op in wanted if op.family is Family.GEMM]
    assert products and all(prices.price(op) for op in products)
    assert {row.op for row in rows} <= wanted.union(*needs.sweep.values())
