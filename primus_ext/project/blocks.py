"""Blocks of memory and pools of free ones, as PyTorch's caching allocator has them."""

from __future__ import annotations

from bisect import bisect_left, insort


class Block:
    """Consecutive bytes of a segment, in use or free.

    ``previous`` and ``next`` are its neighbours in the segment; ``mapped`` is False for address
    space of an expandable segment that no memory stands behind yet.
    """

    __slots__ = ("address", "expandable", "free", "mapped", "next", "pool", "previous", "size",
                 "age")  # fmt: skip

    def __init__(self, pool: Pool, address: int, size: int, expandable: bool = False) -> None:
        self.pool, self.address, self.size = pool, address, size
        self.previous: Block | None = None
        self.next: Block | None = None
        self.free = True
        self.mapped = True
        self.expandable = expandable
        self.age = 0

    @property
    def whole(self) -> bool:
        """Whether it is a segment that is not split."""
        return self.previous is None and self.next is None


class Pool:
    """Free blocks of one stream and one class of sizes, by size and address."""

    __slots__ = ("blocks", "clock", "small", "unmapped")

    def __init__(self, small: bool, clock: list[int]) -> None:
        self.small, self.clock = small, clock
        self.blocks: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []

    def add(self, block: Block) -> None:
        """Keep a free block."""
        block.age = self.clock[0]
        insort(self.blocks, (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        """Forget a block that is here."""
        del self.blocks[bisect_left(self.blocks, (block.size, block.address))]

    def add_unmapped(self, block: Block) -> None:
        """Keep address space without memory."""
        insort(self.unmapped, (block.address, block))

    def remove_unmapped(self, block: Block) -> None:
        """Forget address space that is here."""
        del self.unmapped[bisect_left(self.unmapped, (block.address,))]


def join(block: Block, other: Block | None) -> None:
    """Let ``block`` take over a neighbour, if that is free and as much backed by memory."""
    if other is None or not other.free or block.mapped != other.mapped:
        return
    if block.previous is other:
        block.address, block.previous = other.address, other.previous
        if block.previous is not None:
            block.previous.next = block
    else:
        block.next = other.next
        if block.next is not None:
            block.next.previous = block
    if other.mapped:
        other.pool.remove(other)
    else:
        other.pool.remove_unmapped(other)
    block.size += other.size
