"""Published runs: their mapping to a program, the comparison, and the sanity rows themselves."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import yaml

from primus_ext import cli
from primus_ext.frameworks import published
from primus_ext.runner import UsageError, validate

RUNS = Path(__file__).resolve().parents[1] / "validation" / "sanity_runs.yaml"


def runs() -> dict[str, dict]:
    return {run["id"]: run for run in yaml.safe_load(RUNS.read_text())}


def option(argv: tuple[str, ...], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_a_run_becomes_the_nearest_program() -> None:
    nearest = published.program(runs()["korthikanti22-a100-530b-seqsel"])
    assert (nearest.accelerator, nearest.nodes, nearest.gpus_per_node) == ("a100", 35, 8)
    assert option(nearest.argv, "--num-layers") == "105"
    assert option(nearest.argv, "--tensor-model-parallel-size") == "8"
    assert option(nearest.argv, "--pipeline-model-parallel-size") == "35"
    assert option(nearest.argv, "--num-virtual-stages-per-pipeline-rank") == "3"
    assert option(nearest.argv, "--recompute-granularity") == "selective"
    assert option(nearest.argv, "--attention-backend") == "unfused"
    assert {"--fp16", "--sequence-parallel"} <= set(nearest.argv)
    assert "--use-distributed-optimizer" not in nearest.argv


def test_what_is_assumed_is_said() -> None:
    nearest = published.program(runs()["primus-mi325x-llama3.1-70b-fp8-64g"])
    assert option(nearest.argv, "--fp8-recipe") == "delayed"
    text = "; ".join(nearest.approximations)
    assert "--use-torch-fsdp2" in nearest.argv
    assert "recompute not stated" in text


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("hardware", "gpu"), "V100-32GB-SXM", "V100-32GB-SXM has no data"),
        (("hardware", "num_gpus"), 12, "12 GPUs don't fill nodes of 8"),
        (("model", "num_experts"), 8, "topk is not stated"),
        (("model", "activation"), "swish_of_old", "activation swish_of_old"),
        (("parallelism", "pp_schedule"), "zbv", "schedule zbv is none"),
        (("parallelism", "pp"), None, "pp is not stated"),
        (("batch", "mbs"), None, "mbs is not stated"),
        (("recompute", "granularity"), "some", "recompute some"),
        (("precision", "compute"), "int8", "precision int8"),
        (("model", "vocab_size"), None, "architecture is not stated"),
    ],
)
def test_what_is_not_mapped_is_skipped_with_the_reason(
    path: tuple[str, str], value: object, words: str
) -> None:
    run = copy.deepcopy(runs()["korthikanti22-a100-175b-full"])
    run[path[0]][path[1]] = value
    with pytest.raises(published.NotProjectable, match=words):
        published.program(run)
    assert words in str(validate.project_run(run, lambda *_: None).skipped)


def row(name: str, measured: float, predicted: float) -> validate.Row:
    return validate.Row(
        id=name,
        group="g",
        measured_s=measured,
        predicted_s=predicted,
        interval={"low": 0.9 * predicted, "high": 1.2 * predicted, "level": 0.8},
    )


def test_summary_against_arithmetic_by_hand() -> None:
    rows = [row("a", 1.0, 0.8), row("b", 2.0, 2.2), row("c", 4.0, 3.0)]
    found = validate.summary(rows)
    assert found["mape"] == pytest.approx((20 + 10 + 25) / 3)
    assert found["bias"] == pytest.approx((-20 + 10 - 25) / 3)
    assert found["worst_factor"] == pytest.approx(4 / 3)
    assert found["spearman"] == pytest.approx(1.0)
    assert found["inside_interval"] == pytest.approx(1 / 3)  # 2.0 is inside 1.98 to 2.64
    swapped = [row("a", 1.0, 3.0), row("b", 2.0, 2.0), row("c", 4.0, 1.0)]
    assert validate.summary(swapped)["spearman"] == pytest.approx(-1.0)
    assert validate.summary([]) == {"rows": 0}


def test_unknown_run_subset_and_file_are_named() -> None:
    with pytest.raises(UsageError, match="run nobody is not in"):
        validate.load_runs(RUNS, ["nobody"])
    with pytest.raises(UsageError, match="--subset=x needs a subsets file"):
        validate.subset(RUNS, "x")
    with pytest.raises(UsageError, match="can't be read"):
        validate.load_runs(RUNS.with_name("absent.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["korthikanti22-a100-175b-full", "primus-mi325x-llama3.1-8b-64g"]
)
def test_sanity_within_a_factor_of_one_and_a_half(name: str, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    assert cli.main(["validate", str(RUNS), "--run", name, "--json", str(out)]) == 0
    result = json.loads(out.read_text())
    (found,) = result["rows"]
    assert found["skipped"] is None
    assert 1 / 1.5 <= found["ratio"] <= 1.5
    assert result["summary"]["rows"] == 1
