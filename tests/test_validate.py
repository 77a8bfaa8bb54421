"""Published runs: their mapping to a program, the comparison, and the sanity rows themselves."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from primus_ext import cli
from primus_ext.emulate import batch
from primus_ext.frameworks import published
from primus_ext.report import validation
from primus_ext.runner import UsageError, bulk, scores, validate
from primus_ext.runner import runs as runs_file

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
    assert "recompute.num_layers is not stated: 72 assumed" in text


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


def test_a_process_answers_requests_that_are_alike() -> None:
    assert bulk.SAME is batch.SAME


def row(name: str, measured: float, predicted: float, cell: str = "c") -> scores.Scored:
    return scores.Scored(measured, predicted, cell, 0.9 * predicted, 1.2 * predicted)


def test_summary_against_arithmetic_by_hand() -> None:
    rows = [row("a", 1.0, 0.8), row("b", 2.0, 2.2), row("c", 4.0, 3.0)]
    found = scores.summary(rows)
    assert found["mape"] == pytest.approx((20 + 10 + 25) / 3)
    assert found["bias"] == pytest.approx((-20 + 10 - 25) / 3)
    assert found["worst_factor"] == pytest.approx(4 / 3)
    assert found["spearman"] == found["kendall"] == pytest.approx(1.0)
    assert found["inside"] == pytest.approx(100 / 3)  # 2.0 is inside 1.98 to 2.64
    assert found["half_width"] == pytest.approx(15.0)
    factors = [1 / 0.8, 2 / 2.2, 4 / 3]
    mean = sum(factors) / 3
    spread = (sum((f - mean) ** 2 for f in factors) / 3) ** 0.5
    assert found["k"] == pytest.approx(mean)
    assert found["k_cv"] == pytest.approx(spread / mean * 100)
    assert found["regret"] == 0.0  # the best projection is the best measured one
    swapped = [row("a", 1.0, 3.0), row("b", 2.0, 2.0), row("c", 4.0, 1.0)]
    assert scores.summary(swapped)["spearman"] == pytest.approx(-1.0)
    assert scores.summary(swapped)["regret"] == pytest.approx(300.0)
    assert scores.summary([]) == {"rows": 0}


def test_regret_is_counted_among_alternatives_only() -> None:
    rows = [row("a", 1.0, 3.0, "x"), row("b", 2.0, 2.0, "x"), row("c", 1.0, 9.0, "y"),
            row("d", 5.0, 1.0, "z"), row("e", 1.0, 0.5, "z")]  # fmt: skip
    found = scores.summary(rows)
    assert found["cells"] == 2  # "y" leaves no choice
    assert found["regret"] == pytest.approx((100.0 + 0.0) / 2)
    assert found["regret_worst"] == pytest.approx(100.0)


@given(
    st.lists(
        st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=3, max_size=12
    )
)
def test_rank_correlations_count_pairs(pairs: list[tuple[int, int]]) -> None:
    """Kendall's tau-b from its definition, with ties; both are 1 against themselves."""
    found = scores.summary([row(str(i), m, p) for i, (m, p) in enumerate(pairs)])
    same = less = tied_m = tied_p = 0
    for i, (m, p) in enumerate(pairs):
        for n, q in pairs[:i]:
            tied_m += m == n
            tied_p += p == q
            same += (m - n) * (p - q) > 0
            less += (m - n) * (p - q) < 0
    total = len(pairs) * (len(pairs) - 1) / 2
    scale = ((total - tied_m) * (total - tied_p)) ** 0.5
    if scale:
        assert found["kendall"] == pytest.approx((same - less) / scale)
    else:
        assert found["kendall"] is None and found["spearman"] is None


def test_unknown_run_subset_and_file_are_named() -> None:
    with pytest.raises(UsageError, match="run nobody is not in"):
        runs_file.load(RUNS, ["nobody"])
    with pytest.raises(UsageError, match="--subset=x needs a subsets file"):
        runs_file.subset(RUNS, "x")
    with pytest.raises(UsageError, match="can't be read"):
        runs_file.load(RUNS.with_name("absent.yaml"))


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("normalized", "iteration_time_s"), 0.0, "iteration_time_s=0.0 is not positive"),
        (("normalized", "iteration_time_s"), "fast", "iteration_time_s='fast' is not a number"),
        (("normalized", "iteration_time_s"), float("nan"), "iteration_time_s=nan is not positive"),
        (("parallelism", "tp"), 3, "tp3 x pp"),
        (("parallelism", "cp"), 0, "below 1"),
        (("hardware", "gpu"), "TPU", "accelerator TPU has no data"),
    ],
)
def test_a_bad_row_is_skipped_with_the_reason_and_the_rest_is_not_lost(
    path: tuple[str, str], value: object, words: str
) -> None:
    bad = copy.deepcopy(runs()["korthikanti22-a100-175b-full"])
    bad[path[0]][path[1]] = value
    assert words in str(validate.project_run(bad, lambda *_: None).skipped)


def test_a_row_without_a_part_is_skipped_and_nothing_scored_is_exit_2(tmp_path: Path) -> None:
    bad = copy.deepcopy(runs()["korthikanti22-a100-175b-full"])
    del bad["batch"]
    del bad["normalized"]
    path, out = tmp_path / "bad_runs.yaml", tmp_path / "out.json"
    path.write_text(yaml.safe_dump([bad]))
    assert cli.main(["validate", str(path), "--json", str(out)]) == 2
    (found,) = json.loads(out.read_text())["rows"]
    assert found["skipped"] == "batch is missing"


def test_the_newest_of_equal_configurations_is_scored() -> None:
    run = runs()["korthikanti22-a100-175b-full"]
    old, new, other = (copy.deepcopy(run) for _ in range(3))
    old["id"], new["id"], other["id"] = "old", "new", "other"
    old["software"] = {"container": "NeMo 25.11"}
    new["software"] = {"container": "NeMo 26.02.01"}
    other["batch"]["gbs"] *= 2
    assert runs_file.superseded([new, old, other]) == {"old": "new"}
    assert runs_file.superseded([old, new, other]) == {"old": "new"}
    newer = validate.Row(id="a", measured_s=1.0, predicted_s=1.1)
    older = validate.Row(id="b", measured_s=1.0, predicted_s=3.0, superseded_by="a")
    assert validate.summary([newer, older])["mape"] == pytest.approx(10.0)


def test_only_what_a_partial_row_leaves_open_is_assumed_and_named() -> None:
    run = copy.deepcopy(runs()["korthikanti22-a100-175b-full"])
    run["source"] = {"name": "Primus Projection paper"}
    run["hardware"]["num_gpus"] = 32
    run["model"]["arch_key"] = "mixtral-8x22b"
    run["batch"] = {"mbs": 2, "gbs": None, "seq_len": 4096}
    before = copy.deepcopy(run)
    filled = published.completed(run)
    assert run == before
    assert filled["batch"] == {"mbs": 2, "gbs": 512, "seq_len": 4096}  # 8192 only if not stated
    assert "batch.gbs is not stated: 512 assumed" in filled["assumed"]
    assert not any("seq_len" in note for note in filled["assumed"])
    assert published.completed(filled) is filled
    assert set(filled["assumed"]) <= set(published.program(filled).approximations)
    assert published.completed(runs()["korthikanti22-a100-175b-full"]) == runs()[
        "korthikanti22-a100-175b-full"
    ]


@pytest.mark.parametrize("width", [80, 120])
def test_no_figure_of_a_source_is_cut_off(width: int) -> None:
    name = "a source with quite a long name indeed"
    rows = [
        validate.Row(id=i, source=name, group="g", cell="c", measured_s=2.0, predicted_s=1.9,
                     interval={"low": 1.5, "high": 2.3, "level": 0.8}, peak_predicted=1)
        for i in "abc"
    ]  # fmt: skip
    console = Console(width=width, record=True, file=io.StringIO())
    validation.render(json.loads(validate.to_json(rows)), console)
    shown = console.export_text().splitlines()
    (line,) = (line for line in shown if line.startswith(name[:12]))
    # rows, error, bias, worst, rho, regret, k, cv, inside, half width
    figures = ["3", "5.0", "-5.0", "x1.05", "-", "0.0", "1.053", "0.0", "100", "21"]
    assert line.split()[-10:] == figures
    assert max(map(len, shown)) <= width


def test_tokens_per_second_stand_in_for_a_step_time() -> None:
    run = copy.deepcopy(runs()["korthikanti22-a100-175b-full"])
    run["normalized"] = {"tokens_per_s_per_gpu": 100.0}
    tokens = run["batch"]["gbs"] * run["batch"]["seq_len"]
    expected = tokens / (100.0 * run["hardware"]["num_gpus"])
    assert runs_file.measured_seconds(run) == pytest.approx(expected)


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
