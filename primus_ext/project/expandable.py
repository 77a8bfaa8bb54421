"""Expandable segments of PyTorch's caching allocator: one address range that memory is mapped into.

Rules of ``try_allocate_expandable_block`` and ``unmap_block`` in
``c10/cuda/CUDACachingAllocator.cpp`` (torch 2.14): memory comes in pages of 2 MiB for the small
pool and of the large segment size (20 MiB) for the large one, at the lowest address with room.
"""

from __future__ import annotations

from collections.abc import Callable

from primus_ext.project.blocks import Block, Pool, join

SMALL_PAGE = 2 * 2**20
_UNLIMITED = 2**45
"""Address space of a segment where the capacity is not known."""


def room(block: Block) -> int:
    """Bytes of a free block with the address space after it that it can grow into."""
    after = block.next
    return block.size + (after.size if after is not None and not after.mapped else 0)


class Growth:
    """Maps memory into the segments of one allocator."""

    def __init__(
        self,
        large_page: int,
        capacity: int | None,
        reserve: Callable[[int], bool],
        address_space: Callable[[int, int], int],
    ) -> None:
        """No segment exists yet.

        Args:
            large_page: Page of the large pool in bytes.
            capacity: Memory of the device in bytes; None: unlimited.
            reserve: Takes bytes from the device and says whether there were enough.
            address_space: Size and alignment to the begin of a new address range.
        """
        self._large_page, self._reserve, self._address_space = large_page, reserve, address_space
        self._size = _UNLIMITED if capacity is None else capacity + capacity // 8

    def page(self, pool: Pool) -> int:
        """Bytes that are mapped at once."""
        return SMALL_PAGE if pool.small else self._large_page

    def grow(self, pool: Pool, size: int) -> Block | None:
        """A mapped block of at least ``size`` bytes, out of its pool; None: no memory."""
        block = self._candidate(pool, size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            after = block.next
            assert after is not None  # the candidate has room for the request
            if not self._map(after, min(size - block.size, after.size)):
                return None
            block = after  # which took over what lay before it
        pool.remove(block)
        return block

    def _candidate(self, pool: Pool, size: int) -> Block:
        """The lowest free or unmapped block with ``size`` bytes of free address space."""
        for _, block in pool.unmapped:
            before = block.previous
            first = before if before is not None and before.free else block
            if _free_after(first, size):
                return first
        page = self.page(pool)
        space = -(-self._size // page) * page
        segment = Block(pool, self._address_space(space, page), space, expandable=True)
        segment.mapped = False
        pool.add_unmapped(segment)
        return segment

    def _map(self, block: Block, size: int) -> bool:
        """Put memory behind the first ``size`` bytes of an unmapped block."""
        pool, page = block.pool, self.page(block.pool)
        mapped = -(-size // page) * page
        if not self._reserve(mapped):
            return False
        pool.remove_unmapped(block)
        block.mapped = True
        if mapped < block.size:
            rest = Block(pool, block.address + mapped, block.size - mapped, expandable=True)
            rest.mapped = False
            _insert(rest, block, block.next)
            pool.add_unmapped(rest)
            block.size = mapped
        join(block, block.previous)
        join(block, block.next)
        pool.add(block)
        return True


def unmap(block: Block, page: int) -> int:
    """Take the memory away from the whole pages of a free block; returns how many bytes."""
    pool = block.pool
    begin = -(-block.address // page) * page
    end = (block.address + block.size) // page * page
    if begin >= end:
        return 0
    pool.remove(block)
    if begin > block.address:
        before = Block(pool, block.address, begin - block.address, expandable=True)
        _insert(before, block.previous, block)
        pool.add(before)
    if end < block.address + block.size:
        after = Block(pool, end, block.address + block.size - end, expandable=True)
        _insert(after, block, block.next)
        pool.add(after)
    block.address, block.size, block.mapped = begin, end - begin, False
    join(block, block.previous)
    join(block, block.next)
    if not block.whole:  # otherwise the segment is gone
        pool.add_unmapped(block)
    return end - begin


def _insert(block: Block, before: Block | None, after: Block | None) -> None:
    """Make ``block`` the neighbour of two blocks of one segment."""
    block.previous, block.next = before, after
    if before is not None:
        before.next = block
    if after is not None:
        after.previous = block


def _free_after(block: Block | None, size: int) -> bool:
    """Whether ``size`` bytes from ``block`` on are free, mapped or not."""
    found = 0
    while block is not None and block.free and found < size:
        found += block.size
        block = block.next
    return found >= size
