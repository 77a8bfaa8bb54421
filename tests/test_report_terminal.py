"""The report that a person sees."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from primus_ext.cluster_data import load_cluster
from primus_ext.project.compose import project
from primus_ext.project.result import ExpertImbalance, Projection, Stragglers
from primus_ext.report import terminal
from primus_ext.report.suggestions import suggestions
from primus_ext.report.units import count, gib, percent, seconds
from tests.synthetic import Job, plan, traces


def projected(job: Job, name: str = "h100") -> Projection:
    cluster = load_cluster(name, max(1, job.world // 8), min(8, job.world))
    return project(plan(job), traces(job), cluster, mode="simulate")


def shown(projection: Projection, width: int = 100, **options: bool) -> str:
    out = io.StringIO()
    terminal.render(projection, Console(file=out, width=width, **options))
    return out.getvalue()


SMALL = Job(tp=8, pp=4, dp=2)
HUGE = Job(dp=8, layers=320)


@pytest.mark.parametrize(
    ("job", "word"), [(SMALL, "FITS"), (HUGE, "OUT OF MEMORY")]
)  # fmt: skip
def test_the_verdict_comes_first(job: Job, word: str) -> None:
    text = shown(projected(job))
    assert text.split("\n")[1].startswith(word)
    order = ["Step ", "Memory of one rank", "Where the time goes", "Not modelled"]
    places = [text.index(part) for part in order]
    assert places == sorted(places)


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
@pytest.mark.parametrize("job", [SMALL, HUGE, Job(tp=8, pp=16, vpp=2, microbatches=32)])
def test_no_line_is_wider_than_the_terminal(width: int, job: Job) -> None:
    for line in shown(projected(job), width).splitlines():
        assert len(line.rstrip()) <= width


@pytest.mark.parametrize("width", [60, 100])
def test_uneven_experts_and_slow_ranks_are_told(width: int) -> None:
    plain = projected(SMALL)
    assert "Expert load" not in shown(plain) and "Stragglers" not in shown(plain)
    uneven = dataclasses.replace(
        plain,
        expert_imbalance=ExpertImbalance(
            per_layer={"1": 1.25, "2": 1.75}, largest=1.75, gating=1.5, pooled=1.125
        ),
        stragglers=Stragglers(rank_cv=0.01, ranks=64, low_s=0.5, high_s=1.5, level=0.9),
    )
    lines = shown(uneven, width).splitlines()
    assert max(len(line.rstrip()) for line in lines) <= width
    text = " ".join(" ".join(lines).split())
    assert "1.50 in the layers, for which the others wait (at most 1.75); 1.12 pooled" in text
    assert "the slowest of 64 ranks that vary by 1.0 % each would add 500 ms to 1.50 s" in text


def test_without_colours_it_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = shown(projected(SMALL))
    assert "\x1b" not in plain
    coloured = shown(projected(SMALL), force_terminal=True)
    assert "\x1b[" in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[3" not in shown(projected(SMALL), force_terminal=True)


def test_many_stages_are_summed_up() -> None:
    text = shown(projected(Job(tp=8, pp=16, microbatches=32)))
    assert "more stages between these" in text
    assert text.count("pp stage") < 10


def test_the_bar_is_to_scale() -> None:
    found = projected(SMALL)
    role, capacity = found.memory.per_role[0], found.memory.capacity_bytes
    drawn = terminal.bar(role, capacity, 200).plain
    for letter, size in (("P", role.parts.parameters), ("O", role.parts.optimizer),
                         ("A", role.parts.activations)):  # fmt: skip
        assert drawn.count(letter) == pytest.approx(size / capacity * 200, abs=1)
    assert len(drawn) == 201 and drawn.endswith("|")
    over = projected(HUGE)
    assert terminal.bar(over.memory.per_role[0], over.memory.capacity_bytes, 50).plain[-1] == ">"


def test_warnings_are_shown() -> None:
    found = dataclasses.replace(projected(SMALL), warnings=("something to know",))
    assert "something to know" in shown(found)


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (Job(dp=8, layers=160, distributed_optimizer=False), ["distributed optimizer", "8"]),
        (Job(dp=8, layers=160, recompute=True), ["weights and gradients", "tp or pp"]),
        (Job(dp=8, seq=65536), ["Activations take", "recompute"]),
        (Job(dp=4, tp=2, seq=65536, sequence_parallel=False), ["sequence parallelism"]),
        (Job(dp=8, mbs=16), ["mbs=16"]),
    ],
)
def test_what_does_not_fit_names_the_knob_of_its_largest_part(job: Job, words: list[str]) -> None:
    found = projected(job)
    assert found.memory.verdict == "oom"
    text = " ".join(suggestions(found))
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (Job(pp=8, dp=1, microbatches=8, overlap=False), ["Pipeline bubble takes", "vpp"]),
        (Job(tp=8, dp=2, overlap=False, layers=8), ["overlap_grad_reduce"]),
        (Job(tp=8), ["Tensor-parallel communication takes", "smaller tp"]),
        (Job(tp=8, recompute=True), ["Recompute takes", "recompute less"]),
        (Job(tp=8, layers=8), ["mbs=2 fits"]),
    ],
)
def test_what_fits_names_what_costs_most(job: Job, words: list[str]) -> None:
    found = projected(job)
    assert found.memory.verdict == "fits"
    text = " ".join(suggestions(found))
    assert all(word in text for word in words), text


def test_nothing_is_suggested_that_does_not_follow() -> None:
    text = " ".join(suggestions(projected(Job(tp=1, pp=1, dp=8, overlap=True, microbatches=64))))
    assert "tensor-parallel" not in text.lower()
    assert "bubble" not in text.lower()
    assert "overlap_grad_reduce" not in text


def test_units() -> None:
    assert gib(80 * 2**30) == "80.0 GiB"
    assert [seconds(s) for s in (17.56, 0.7495, 4.2e-6, 123.4, 0.0)] == [
        "17.6 s", "750 ms", "4.20 us", "123 s", "0.00 us",
    ]  # fmt: skip
    assert count(70_553_706_496) == "70.55 B"
    assert count(135_000_000) == "135.0 M"
    assert percent(0.0432) == "4.3 %"
