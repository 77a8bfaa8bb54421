"""Lines against size, and from group size to group size, on times that are known."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primus_ext.cost import piecewise
from primus_ext.cost.group_sizes import Host, Parts, crowded, estimate, steps, volume
from primus_ext.trace import CollectiveKind

SIZES = [2**power for power in range(10, 26)]
DEVICES = Host(8, None)


@given(
    start=st.floats(1e-6, 1e-3), rate=st.floats(1e-12, 1e-8), scale=st.floats(1e-3, 1e3),
    chosen=st.sets(st.sampled_from(SIZES), min_size=3),
)  # fmt: skip
def test_one_line_comes_back_and_scales_with_the_times(
    start: float, rate: float, scale: float, chosen: set[int]
) -> None:
    curve = piecewise.fit([(size, start + rate * size) for size in chosen])
    assert len(curve.lines) == 1 and curve.residual < 1e-6
    slower = piecewise.fit([(size, scale * (start + rate * size)) for size in chosen])
    for size in (*chosen, 3 * max(chosen)):
        assert curve.seconds(size) == pytest.approx(start + rate * size, rel=1e-6)
        assert slower.seconds(size) == pytest.approx(scale * curve.seconds(size), rel=1e-6)


@settings(max_examples=50)
@given(
    start=st.floats(5e-6, 1e-4), rate=st.floats(1e-10, 1e-9), switch=st.integers(13, 22),
    later=st.floats(2.0, 20.0), faster=st.floats(0.1, 0.5),
)  # fmt: skip
def test_a_switch_is_found_where_it_is(
    start: float, rate: float, switch: int, later: float, faster: float
) -> None:
    """Small messages on one line, large ones on another, a jump between two neighbours."""

    def truth(size: float) -> float:
        return start + rate * size if size <= 2**switch else later * start + faster * rate * size

    curve = piecewise.fit([(size, truth(size)) for size in SIZES])
    jump = abs(math.log(truth(2**switch) / (later * start + faster * rate * 2**switch)))
    if jump < 0.05:  # the lines cross there: no switch to be seen
        return
    assert len(curve.lines) == 2
    assert 2**switch <= curve.lines[0].upto <= 2 ** (switch + 1)
    for size in (1500, 2**switch, 2 ** (switch + 1), 3 << 24):
        assert curve.seconds(size) == pytest.approx(truth(size), rel=1e-3)


@given(st.lists(st.tuples(st.sampled_from(SIZES), st.floats(1e-6, 1.0)), min_size=1,
                unique_by=lambda point: point[0]))  # fmt: skip
def test_any_points_give_a_positive_curve(points: list[tuple[int, float]]) -> None:
    curve = piecewise.fit(points)
    uptos = [line.upto for line in curve.lines]
    assert uptos == sorted(uptos) and uptos[-1] == math.inf
    assert all(line.start >= 0 and line.rate >= 0 for line in curve.lines)
    assert all(curve.seconds(size) > 0 for size in (1, *SIZES))
    least = max(1, len(points) // piecewise.POINTS)
    assert len(curve.lines) <= least


@pytest.mark.parametrize(("noise", "bound"), [(0.02, 0.03), (0.1, 0.1)])
def test_held_out_sizes_of_noisy_times_are_met(noise: float, bound: float) -> None:
    """Three lines with jumps, times with log-normal noise; every second size is held out."""
    draw, errors = random.Random(7), []

    def truth(size: float) -> float:
        if size <= 2**14:
            return 12e-6 + size * 2e-9
        return 40e-6 + size * 6e-10 if size <= 2**20 else 250e-6 + size * 3e-10

    every = sorted({int(2 ** (power / 2)) for power in range(20, 51)})
    for _ in range(20):
        times = {size: truth(size) * math.exp(draw.gauss(0, noise)) for size in every}
        curve = piecewise.fit([(size, times[size]) for size in every[::2]], noise)
        errors += [abs(curve.seconds(size) / truth(size) - 1) for size in every[1::2]]
    assert statistics.median(errors) < bound


def test_noise_alone_makes_no_switch() -> None:
    draw = random.Random(3)
    counts = []
    for _ in range(40):
        points = [(s, (2e-5 + s * 1e-9) * math.exp(draw.gauss(0, 0.05))) for s in SIZES]
        counts.append(len(piecewise.fit(points, 0.05).lines))
    assert statistics.mean(counts) < 1.3


def test_no_point_and_no_time_are_refused() -> None:
    for points in ([], [(1024, 0.0)], [(1024, -1.0)]):
        with pytest.raises(ValueError, match="positive"):
            piecewise.fit(points)


def lawful(kind: CollectiveKind, members: int, size: int, host: Host = DEVICES) -> Parts:
    crowding = host.crowding(members)
    return Parts(1e-5 * steps(kind, members) * crowding,
                 1e-10 * size * volume(kind, members) * crowding)  # fmt: skip


@pytest.mark.parametrize("kind", CollectiveKind)
@pytest.mark.parametrize("host", [DEVICES, Host(8, 2)])
@pytest.mark.parametrize(
    ("known", "asked"), [((2, 4), 3), ((2, 8), 4), ((2, 4), 8), ((4, 8), 2), ((2, 4, 8), 6)]
)
def test_what_follows_the_law_is_met_in_groups_that_were_not_measured(
    kind: CollectiveKind, host: Host, known: tuple[int, ...], asked: int
) -> None:
    for size in (1024, 1 << 24):
        found = estimate(kind, {n: lawful(kind, n, size, host) for n in known}, asked, host)
        assert found.parts.seconds == pytest.approx(lawful(kind, asked, size, host).seconds)
        assert found.low <= found.parts.seconds <= found.high


def test_the_law_is_that_of_rings_and_trees() -> None:
    reduce, gather, cast = (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER,
                            CollectiveKind.BROADCAST)  # fmt: skip
    assert [steps(reduce, n) for n in (2, 4, 8)] == [2, 6, 14]
    assert [volume(gather, n) for n in (2, 4, 8)] == [1 / 2, 3 / 4, 7 / 8]
    assert [steps(cast, n) for n in (2, 3, 4, 5, 8)] == [1, 2, 2, 3, 3]


@given(
    kind=st.sampled_from(list(CollectiveKind)),
    times=st.dictionaries(
        st.integers(2, 64), st.builds(Parts, st.floats(0, 1), st.floats(1e-9, 1)), min_size=1
    ),
    asked=st.integers(2, 512), cores=st.one_of(st.none(), st.integers(1, 64)),
)  # fmt: skip
def test_an_estimate_lies_in_its_interval_and_measured_groups_are_kept(
    kind: CollectiveKind, times: dict[int, Parts], asked: int, cores: int | None
) -> None:
    found = estimate(kind, times, asked, Host(64, cores))
    assert 0 < found.low <= found.parts.seconds * (1 + 1e-9)
    assert found.parts.seconds <= found.high * (1 + 1e-9)
    if asked in times:
        assert found.parts == times[asked]


def test_the_interval_widens_with_the_distance() -> None:
    kind = CollectiveKind.ALL_REDUCE
    known = {2: Parts(1e-5, 1e-3), 4: Parts(2e-5, 1.1e-3)}
    widths = [
        found.high / found.low
        for found in (estimate(kind, known, n, DEVICES) for n in (4, 8, 16, 64, 256))
    ]
    assert widths[0] == 1
    assert all(a < b for a, b in itertools.pairwise(widths))


def test_more_processes_than_cores_take_turns() -> None:
    assert [Host(n, 2).crowding(2) for n in (2, 4, 8)] == [1, 2, 4]
    assert Host(4, 2).crowding(3) == 1.5  # the fourth has no group
    one = estimate(CollectiveKind.BARRIER, {2: Parts(1e-5, 0.0)}, 2, Host(2, 2))
    twice = crowded(one, 2.0)
    assert (twice.low, twice.parts.seconds, twice.high) == (1e-5, 2e-5, 2e-5)
