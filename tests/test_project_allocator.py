"""The model of PyTorch's caching allocator against its rules, worked out by hand."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primus_ext.project.allocator import Allocator, OutOfMemoryError
from primus_ext.project.allocator_config import (
    VARIABLES,
    AllocatorConfig,
    AllocatorConfigError,
    from_environment,
    parse,
    variable,
)
from primus_ext.project.blocks import Block

KIB, MIB = 2**10, 2**20


@pytest.mark.parametrize(
    ("requested", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 11 * MIB, 12 * MIB),  # what is left over is not above 1 MiB: not split
        (50 * MIB + 1, 50 * MIB + 512, 52 * MIB),
    ],
)
def test_one_request(requested: int, block: int, segment: int) -> None:
    allocator = Allocator()
    got = allocator.malloc(requested)
    assert allocator.reserved == segment
    rest = segment - block
    kept = rest and (rest >= 512 if block <= MIB else rest > MIB)
    assert got.size == allocator.allocated == (block if kept else segment)
    allocator.release(got)
    assert (allocator.allocated, allocator.reserved) == (0, segment)
    allocator.empty_cache()
    assert allocator.reserved == 0


def test_small_requests_share_a_segment_and_classes_do_not_mix() -> None:
    allocator = Allocator()
    for _ in range(4):
        allocator.malloc(512 * KIB)
    assert allocator.reserved == 2 * MIB
    allocator.malloc(2 * MIB)
    assert allocator.reserved == 22 * MIB
    allocator.malloc(512)  # 18 MiB are free in the large pool, none in the small one
    assert allocator.reserved == 24 * MIB


def test_the_smallest_block_that_fits_is_taken_and_the_lowest_of_equals() -> None:
    allocator = Allocator()
    blocks = [allocator.malloc(size * MIB) for size in (40, 20, 30, 20)]
    for block in blocks:
        allocator.release(block)
    got = [allocator.malloc(19 * MIB + 1), allocator.malloc(20 * MIB), allocator.malloc(21 * MIB)]
    assert [b.address for b in got] == [blocks[1].address, blocks[3].address, blocks[2].address]
    assert got[0].size == 20 * MIB  # less than 1 MiB would be left: not split
    assert got[2].size == 21 * MIB
    assert allocator.reserved == 110 * MIB


def test_freed_neighbours_are_joined() -> None:
    allocator = Allocator()
    one = allocator.malloc(64 * MIB)
    allocator.release(one)
    parts = [allocator.malloc(16 * MIB) for _ in range(4)]
    assert allocator.reserved == 64 * MIB
    for index in (0, 2, 3, 1):
        allocator.release(parts[index])
    assert allocator.malloc(64 * MIB).address == one.address
    assert allocator.reserved == 64 * MIB


def test_a_piece_in_use_keeps_the_whole_segment() -> None:
    allocator = Allocator()
    allocator.release(allocator.malloc(64 * MIB))
    kept, free = allocator.malloc(2 * MIB), allocator.malloc(60 * MIB)
    allocator.release(free)
    allocator.empty_cache()
    assert (allocator.allocated, allocator.reserved) == (2 * MIB, 64 * MIB)
    allocator.malloc(64 * MIB)
    assert allocator.reserved == 128 * MIB
    allocator.release(kept)
    allocator.empty_cache()
    assert allocator.reserved == 64 * MIB


def test_a_stream_does_not_use_the_blocks_of_another() -> None:
    allocator = Allocator()
    allocator.release(allocator.malloc(32 * MIB, stream=1))
    allocator.malloc(32 * MIB)
    assert allocator.reserved == 64 * MIB


def test_unused_segments_go_back_when_the_device_is_full() -> None:
    allocator = Allocator(capacity=100 * MIB)
    allocator.release(allocator.malloc(60 * MIB))
    allocator.malloc(70 * MIB)
    assert (allocator.reserved, allocator.peak_reserved, allocator.retries) == (
        70 * MIB, 70 * MIB, 1)  # fmt: skip
    with pytest.raises(OutOfMemoryError) as caught:
        allocator.malloc(40 * MIB)
    assert (caught.value.allocated, caught.value.reserved) == (70 * MIB, 70 * MIB)


def test_a_fragmented_device_runs_out_although_enough_is_free() -> None:
    allocator = Allocator(capacity=100 * MIB)
    allocator.release(allocator.malloc(100 * MIB))
    first, _ = allocator.malloc(40 * MIB), allocator.malloc(20 * MIB)
    allocator.release(first)
    assert allocator.capacity is not None
    assert allocator.capacity - allocator.allocated == 80 * MIB
    with pytest.raises(OutOfMemoryError):
        allocator.malloc(60 * MIB)


def test_oversize_blocks_are_neither_split_nor_given_to_small_requests() -> None:
    allocator = Allocator(parse("max_split_size_mb:100"), capacity=400 * MIB)
    big = allocator.malloc(200 * MIB)
    allocator.release(big)
    allocator.malloc(50 * MIB)
    assert allocator.reserved == 250 * MIB
    taken = allocator.malloc(190 * MIB)  # within 20 MiB of the block
    assert (taken.size, allocator.reserved) == (200 * MIB, 250 * MIB)
    allocator.release(taken)
    allocator.malloc(150 * MIB)  # the block is 50 MiB too large: a new one
    assert (allocator.reserved, allocator.retries) == (400 * MIB, 0)
    allocator.malloc(50 * MIB)  # the oversize block goes back, nothing else
    assert (allocator.reserved, allocator.retries) == (250 * MIB, 0)


@pytest.mark.parametrize(
    ("requested", "rounded"),
    [(1200, 1536), (1025 * KIB, 1280 * KIB), (1024 * KIB, 1024 * KIB), (1281 * KIB, 1536 * KIB),
     (1793 * KIB, 2048 * KIB), (2049 * KIB, 2560 * KIB)],
)  # fmt: skip
def test_sizes_are_rounded_up_between_powers_of_two(requested: int, rounded: int) -> None:
    # 1200 lies below 512 x 4: plain rounding
    assert Allocator(parse("roundup_power2_divisions:4")).round_size(requested) == rounded


def test_divisions_by_interval() -> None:
    config = parse("roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1]")
    sizes = (32, 64, 127, 128, 256, 512, 1024, 2048, 2**17)
    assert [config.roundup_divisions(s * MIB) for s in sizes] == [8, 8, 8, 2, 4, 2, 4, 1, 1]


def test_unused_segments_are_collected_above_the_threshold() -> None:
    config = parse("garbage_collection_threshold:0.5,per_process_memory_fraction:0.5")
    allocator = Allocator(config, capacity=800 * MIB)  # 400 MiB are allowed
    old = allocator.malloc(150 * MIB)
    allocator.release(old)
    allocator.malloc(100 * MIB + 512)  # out of the old one: nothing is unused any more
    allocator.release(allocator.malloc(120 * MIB))
    allocator.malloc(130 * MIB)  # 270 MiB > 200 MiB: the 120 MiB go back first
    assert allocator.reserved == 280 * MIB


def test_expandable_segments_grow_by_pages_and_lose_nothing_between() -> None:
    allocator = Allocator(parse("expandable_segments:True"))
    first = allocator.malloc(50 * MIB)
    assert allocator.reserved == 60 * MIB
    second = allocator.malloc(25 * MIB)  # 10 MiB are mapped, 20 more are needed
    assert allocator.reserved == 80 * MIB
    assert second.address == first.address + first.size
    allocator.malloc(512)
    assert allocator.reserved == 82 * MIB  # the small pool has pages of 2 MiB
    allocator.release(first)
    allocator.malloc(60 * MIB)  # does not fit into the hole: 5 MiB are free at the end
    assert allocator.reserved == 142 * MIB
    allocator.empty_cache()  # 40 of the hole's 50 MiB are whole pages
    assert allocator.reserved == 102 * MIB


def test_expandable_segments_fill_unmapped_holes_first() -> None:
    allocator = Allocator(parse("expandable_segments:True"), capacity=100 * MIB)
    hole, _ = allocator.malloc(60 * MIB), allocator.malloc(20 * MIB)
    allocator.release(hole)
    allocator.empty_cache()
    assert allocator.reserved == 20 * MIB
    assert allocator.malloc(45 * MIB).address == hole.address
    assert allocator.reserved == 80 * MIB
    with pytest.raises(OutOfMemoryError):
        allocator.malloc(90 * MIB)


def test_a_block_is_released_once() -> None:
    allocator = Allocator()
    block = allocator.malloc(1)
    allocator.release(block)
    with pytest.raises(ValueError, match="released before"):
        allocator.release(block)


REQUESTS = st.lists(
    st.one_of(
        st.tuples(st.just("malloc"), st.integers(1, 64 * MIB), st.integers(0, 1)),
        st.tuples(st.just("free"), st.integers(0, 2**30), st.just(0)),
    ),
    max_size=120,
)
CONFIGS = st.sampled_from(
    ["", "expandable_segments:True", "max_split_size_mb:20", "roundup_power2_divisions:8"]
)


def played(allocator: Allocator, requests: list[tuple[str, int, int]]) -> list[Block]:
    """Serve requests; a free takes any live block."""
    live: list[Block] = []
    for kind, value, stream in requests:
        if kind == "malloc":
            live.append(allocator.malloc(value, stream))
        elif live:
            allocator.release(live.pop(value % len(live)))
        assert allocator.allocated == sum(block.size for block in live)
        assert allocator.reserved >= allocator.allocated
        spans = sorted((block.address, block.address + block.size) for block in live)
        assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False))
    return live


@given(requests=REQUESTS, text=CONFIGS)
@settings(max_examples=150, deadline=None)
def test_blocks_never_overlap_and_everything_goes_back(
    requests: list[tuple[str, int, int]], text: str
) -> None:
    allocator = Allocator(parse(text))
    live = played(allocator, requests)
    assert allocator.peak_reserved >= allocator.peak_allocated
    again = Allocator(parse(text))
    played(again, requests)
    assert (again.reserved, again.peak_allocated) == (allocator.reserved, allocator.peak_allocated)
    for block in live:
        allocator.release(block)
    allocator.empty_cache()
    assert (allocator.allocated, allocator.reserved) == (0, 0)


@given(sizes=st.lists(st.integers(1, 256 * MIB), max_size=60))
@settings(max_examples=100, deadline=None)
def test_expandable_segments_take_no_more_than_their_last_page(sizes: list[int]) -> None:
    classic, expandable = Allocator(), Allocator(AllocatorConfig(expandable_segments=True))
    for size in sizes:
        classic.malloc(size)
        expandable.malloc(size)
    assert expandable.allocated <= classic.allocated
    assert expandable.reserved < expandable.allocated + 22 * MIB
    assert expandable.reserved < classic.reserved + 22 * MIB


LEGAL = [
    "", "expandable_segments:True", "expandable_segments:False, max_split_size_mb:20",
    "max_non_split_rounding_mb:20", "large_segment_size_mb:11,max_split_size_mb:11",
    "backend:native", "garbage_collection_threshold:0.8", "roundup_power2_divisions:8",
    "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]", "pinned_use_background_threads:True",
    "per_process_memory_fraction:0.5", "expandable_segments:True,",
]  # fmt: skip
ILLEGAL = [
    "expandable_segments:true", "max_split_size_mb:19", "max_non_split_rounding_mb:19",
    "large_segment_size_mb:10", "garbage_collection_threshold:1.0",
    "garbage_collection_threshold:0.0", "roundup_power2_divisions:3",
    "roundup_power2_divisions:[3:2]", "roundup_power2_divisions:[4:3]",
    "roundup_power2_divisions:0", "foo:1",
    "max_split_size_mb:x", "large_segment_size_mb:40,max_split_size_mb:30",
]  # fmt: skip


def accepted_by_torch(text: str) -> bool:
    import torch

    try:
        torch._C._accelerator_setAllocatorSettings(text)
    except (ValueError, RuntimeError, TypeError):
        return False
    finally:
        torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20")
    return True


@pytest.mark.parametrize("text", LEGAL)
def test_what_torch_accepts_is_accepted(text: str) -> None:
    assert accepted_by_torch(text)
    parse(text)


@pytest.mark.parametrize("text", ILLEGAL)
def test_what_torch_refuses_is_refused(text: str) -> None:
    assert not accepted_by_torch(text)
    with pytest.raises(AllocatorConfigError, match="PYTORCH_ALLOC_CONF"):
        parse(text)


@pytest.mark.parametrize("names", [VARIABLES, VARIABLES[1:], VARIABLES[2:]])
def test_the_variable_that_torch_reads_counts(names: tuple[str, ...]) -> None:
    values = {name: f"max_split_size_mb:{60 + number}" for number, name in enumerate(names)}
    code = "import torch; print(torch._C._accelerator_getAllocatorSettings())"
    environment = {k: v for k, v in os.environ.items() if k not in VARIABLES}
    said = subprocess.run(
        [sys.executable, "-c", code], env={**environment, **values}, capture_output=True, text=True,
        check=True,
    ).stdout.strip()  # fmt: skip
    assert variable(values) == names[0]
    assert from_environment(values) == parse(said) == parse("max_split_size_mb:60")


def test_another_allocator_is_refused_by_name() -> None:
    with pytest.raises(AllocatorConfigError, match="backend:cudaMallocAsync is not modelled"):
        parse("backend:cudaMallocAsync")
