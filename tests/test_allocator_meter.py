"""The allocator meter: what counts as device memory, from PyTorch's own events."""

from __future__ import annotations

import pytest
import torch

from primus_ext.observe.allocator_meter import (
    FUSED,
    HOST,
    AllocatorMeter,
    Block,
    Event,
    Metered,
    blocks,
    evaluate,
    region,
)


def metered(work) -> Metered:
    meter = AllocatorMeter()
    meter.start()
    kept = work(meter)
    found = meter.stop()
    del kept
    return found


def test_the_allocator_reports_what_was_asked_for() -> None:
    def work(meter: AllocatorMeter) -> list[torch.Tensor]:
        kept = [torch.empty(n, dtype=torch.uint8) for n in (1, 63, 65, 1000)]
        meter.mark()
        return kept

    found = metered(work)
    assert found.live_bytes == found.peak_bytes == 1 + 63 + 65 + 1000


def test_a_composite_operator_is_its_parts() -> None:
    def work(meter: AllocatorMeter) -> list[torch.Tensor]:
        x, weight = torch.ones(4, 8, dtype=torch.float64), torch.ones(2, 8)
        meter.mark()  # .to() makes 4*8 floats, which live through the product of 4*2
        return [torch.nn.functional.linear(x.to(torch.float32), weight), x, weight]

    found = metered(work)
    assert found.live_bytes == 4 * 8 * 8 + 2 * 8 * 4
    assert found.peak_bytes == found.live_bytes + 4 * 8 * 4 + 4 * 2 * 4


def test_the_scratch_of_a_kernel_is_not_device_memory() -> None:
    def work(meter: AllocatorMeter) -> list[torch.Tensor]:
        x = torch.ones(64, 64)
        meter.mark()
        return [x, torch.linalg.inv(x + torch.eye(64))]  # LAPACK's pivots and copies

    found = metered(work)
    # the sum and the identity live until the inverse (one matrix, and its 4-byte info) is made
    assert found.peak_bytes <= 64 * 64 * 4 * 4 + 64


def test_a_number_that_becomes_a_tensor_stays_on_the_host() -> None:
    def work(meter: AllocatorMeter) -> list[torch.Tensor]:
        x = torch.ones(10)
        meter.mark()
        return [x, x + 1]

    assert metered(work).peak_bytes == 80


def test_a_random_state_stays_on_the_host() -> None:
    def work(meter: AllocatorMeter) -> list[torch.Tensor]:
        meter.mark()
        return [torch.ones(10), torch.get_rng_state()]

    assert metered(work).peak_bytes == 40


@pytest.mark.parametrize(("name", "peak"), [(FUSED, 80), (HOST, 40), ("other", 120)])
def test_regions(name: str, peak: int) -> None:
    def work(meter: AllocatorMeter) -> list[torch.Tensor]:
        x = torch.ones(10)
        meter.mark()
        with region(name):
            return [x, x.sin().cos()]

    assert metered(work).peak_bytes == peak


def test_only_the_last_mark_counts() -> None:
    def work(meter: AllocatorMeter) -> list[torch.Tensor]:
        meter.mark()
        torch.ones(1000)
        meter.mark()
        return [torch.ones(10)]

    assert metered(work).peak_bytes == 40


def test_a_profile_without_a_mark_has_no_peak() -> None:
    with pytest.raises(RuntimeError, match="no mark"):
        metered(lambda _: [torch.ones(10)])


def event(time: int, address: int, size: int, owner: str = "aten::x", end: int = 0) -> Event:
    return Event(time, address, size, owner, end, in_host=False)


def test_an_address_that_is_used_again_is_another_block() -> None:
    found = [event(1, 7, 100), event(2, 7, -100), event(3, 7, 50)]
    assert list(blocks(found)) == [Block(100, 1, 2, "aten::x"), Block(50, 3, None, "aten::x")]
    assert evaluate(found, marked_ns=0).peak_bytes == 100
    assert evaluate(found, marked_ns=2) == Metered(0, 50, (Block(50, 3, None, "aten::x"),))


def test_what_is_freed_after_its_operator_counts() -> None:
    inside, after = event(1, 1, 8, end=5), event(1, 2, 8, end=5)
    found = [inside, after, event(4, 1, -8), event(6, 2, -8)]
    assert evaluate(found, marked_ns=0).peak_bytes == 8
