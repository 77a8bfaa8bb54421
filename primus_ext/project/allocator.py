"""PyTorch's caching allocator, as a model: what it reserves for a sequence of requests.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` (torch 2.14): requests are rounded to
512 bytes; up to 1 MiB they share 2 MiB segments, below 10 MiB 20 MiB segments, larger ones get a
segment of their own in steps of 2 MiB; the smallest free block of the stream that is large enough
serves a request, the lowest address among equals, and is split where enough remains; neighbours
that are free are joined.  Addresses of new segments are taken to rise.  A segment goes back to the
device only when a request fails, and only whole.
"""

from __future__ import annotations

from bisect import bisect_left

from primus_ext.project import expandable
from primus_ext.project.allocator_config import AllocatorConfig
from primus_ext.project.blocks import Block, Pool, join

MIN_BLOCK = 512
SMALL_SIZE = 2**20
"""Largest request that the small pool serves."""
SMALL_SEGMENT = 2 * 2**20
MIN_LARGE = 10 * 2**20
"""From here on a request gets a segment of its own size."""
ROUND_LARGE = 2 * 2**20


class OutOfMemoryError(Exception):
    """A request that can't be served even after everything unused was given back."""

    def __init__(self, requested: int, allocated: int, reserved: int) -> None:
        super().__init__(
            f"{requested} bytes requested, {allocated} allocated, {reserved} reserved"
        )
        self.requested, self.allocated, self.reserved = requested, allocated, reserved


class Allocator:
    """The allocator of one device.  All figures in bytes."""

    def __init__(
        self, config: AllocatorConfig | None = None, *, capacity: int | None = None
    ) -> None:
        """An allocator that has reserved nothing.

        Args:
            config: Settings of the allocator.
            capacity: What it may reserve; None: anything.
        """
        self.config = config or AllocatorConfig()
        self.capacity = capacity
        if capacity is not None and self.config.memory_fraction < 1.0:
            self.capacity = int(capacity * self.config.memory_fraction)
        self.allocated = self.peak_allocated = 0
        self.reserved = self.peak_reserved = 0
        self.retries = 0
        """How often unused segments were given back to serve a request."""
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._clocks = {True: [0], False: [0]}  # searches, by class of sizes
        self._end = SMALL_SEGMENT  # where the next segment begins
        self._growth = expandable.Growth(
            self.config.large_segment_size, self.capacity, self._reserve, self._address_space
        )
        self._collects = (
            self.capacity is not None
            and self.config.memory_fraction < 1.0
            and self.config.garbage_collection_threshold > 0.0
        )

    def malloc(self, requested: int, stream: int = 0) -> Block:
        """A block for ``requested`` bytes (more than 0) that work on ``stream`` uses.

        Raises:
            OutOfMemoryError: There is no room within the capacity.
        """
        size = self.round_size(requested)
        key = (stream, size <= SMALL_SIZE)
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = Pool(key[1], self._clocks[key[1]])
        block = self._cached(pool, size) or self._new(pool, size)
        remaining = block.size - size
        if remaining and self._splits(pool, size, remaining):
            rest = Block(pool, block.address + size, remaining, block.expandable)
            rest.previous, rest.next = block, block.next
            if rest.next is not None:
                rest.next.previous = rest
            block.next, block.size = rest, size
            pool.add(rest)
        block.free = False
        self.allocated += block.size
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
        return block

    def release(self, block: Block) -> None:
        """Take back a block that :meth:`malloc` gave."""
        if block.free:
            raise ValueError(f"block at {block.address} was released before")
        self.allocated -= block.size
        block.free = True
        pool = block.pool
        join(block, block.previous)
        join(block, block.next)
        pool.add(block)

    def empty_cache(self) -> None:
        """Give every segment back that nothing uses (``torch.cuda.empty_cache``)."""
        for pool in self._pools.values():
            for _, _, block in list(pool.blocks):
                if block.expandable:
                    self.reserved -= expandable.unmap(block, self._growth.page(pool))
                elif block.whole:
                    self._give_back(block)

    def reset_peaks(self) -> None:
        """Start new peaks at what is allocated and reserved now."""
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def round_size(self, requested: int) -> int:
        """Bytes of the block that serves a request."""
        if requested < MIN_BLOCK:
            return MIN_BLOCK
        divisions = self.config.roundup_divisions(requested)
        if divisions > 1 and requested > MIN_BLOCK * divisions:
            floor = 1 << (requested.bit_length() - 1)
            step = floor >> (divisions.bit_length() - 1)
            if requested == floor:
                return requested
            return -(-requested // step) * step if step else floor * 2
        return -(-requested // MIN_BLOCK) * MIN_BLOCK

    def _splits(self, pool: Pool, size: int, remaining: int) -> bool:
        if pool.small or self.config.expandable_segments:
            return remaining >= MIN_BLOCK
        most = self.config.max_split_size
        return remaining > SMALL_SIZE and (most is None or size < most)

    def _cached(self, pool: Pool, size: int) -> Block | None:
        """The free block that serves a request best, taken out of its pool."""
        if self._collects:
            pool.clock[0] += 1
        blocks = pool.blocks
        at = bisect_left(blocks, (size,))
        if at == len(blocks):
            return None
        if blocks[at][2].expandable:
            # the last mapped block counts with the room that it can grow into
            room = expandable.room
            while at + 1 < len(blocks) and room(blocks[at + 1][2]) < room(blocks[at][2]):
                at += 1
        block = blocks[at][2]
        most = self.config.max_split_size
        if most is not None:
            if size < most <= block.size:
                return None
            if size >= most and block.size >= size + self.config.max_non_split_rounding:
                return None
        del blocks[at]
        return block

    def _new(self, pool: Pool, size: int) -> Block:
        """A block from the device, after giving back as much as that takes."""
        if self._collects:
            self._collect()
        block = self._from_device(pool, size)
        if block is None and self._give_back_oversize(pool, size):
            block = self._from_device(pool, size)
        if block is None:
            self.retries += 1
            self.empty_cache()
            block = self._from_device(pool, size)
        if block is None:
            raise OutOfMemoryError(size, self.allocated, self.reserved)
        return block

    def _from_device(self, pool: Pool, size: int) -> Block | None:
        if self.config.expandable_segments:
            return self._growth.grow(pool, size)
        if size <= SMALL_SIZE:
            segment = SMALL_SEGMENT
        elif size < MIN_LARGE:
            segment = self.config.large_segment_size
        else:
            segment = -(-size // ROUND_LARGE) * ROUND_LARGE
        if not self._reserve(segment):
            return None
        block = Block(pool, self._end, segment)
        self._end += segment
        return block

    def _reserve(self, size: int) -> bool:
        if self.capacity is not None and self.reserved + size > self.capacity:
            return False
        self.reserved += size
        if self.reserved > self.peak_reserved:
            self.peak_reserved = self.reserved
        return True

    def _address_space(self, size: int, alignment: int) -> int:
        """Where ``size`` bytes of address space begin."""
        begin = -(-self._end // alignment) * alignment
        self._end = begin + size
        return begin

    def _give_back(self, block: Block) -> None:
        """Return a segment that is not split to the device (``cudaFree``)."""
        self.reserved -= block.size
        block.pool.remove(block)

    def _give_back_oversize(self, pool: Pool, size: int) -> bool:
        """Return segments that may not be split, as many as ``size`` bytes take, if they do."""
        most = self.config.max_split_size
        if most is None:
            return False
        wanted = max(size, most)
        at = bisect_left(pool.blocks, (wanted,))
        if at < len(pool.blocks):
            self._give_back(pool.blocks[at][2])
            return True
        released = 0
        while released < wanted and pool.blocks and pool.blocks[-1][0] >= most:
            released += pool.blocks[-1][0]
            self._give_back(pool.blocks[-1][2])
        return released >= wanted

    def _collect(self) -> None:
        """Return large segments that were not used for longest, down to the threshold."""
        assert self.capacity is not None
        excess = self.reserved - int(self.config.garbage_collection_threshold * self.capacity)
        pools = [p for (_, small), p in self._pools.items() if not small]
        unused = [b for p in pools for _, _, b in p.blocks if b.whole and not b.expandable]
        now = self._clocks[False][0]
        while excess > 0 and unused:
            middle = sum(now - b.age for b in unused) / len(unused)
            old = [b for b in unused if now - b.age >= middle]
            for block in old:
                excess -= block.size
                self._give_back(block)
            unused = [b for b in unused if now - b.age < middle]
