"""Hands out cache blocks, shares full ones by content, and evicts the longest unused; knows ids, never tensors."""

from __future__ import annotations

from collections import OrderedDict, deque


class BlockPool:
    """A fixed number of blocks, counted by reference.

    A block that was registered under a key stays findable after its last user has gone, until its place is needed.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._unused: deque[int] = deque(range(num_blocks))
        self._evictable: OrderedDict[int, bytes] = OrderedDict()
        self._users = [0] * num_blocks
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        """Number of blocks that no sequence holds, reusable ones included."""
        return len(self._unused) + len(self._evictable)

    def allocate(self) -> int | None:
        """A block of undefined content for one user, or None when every block is held."""
        if self._unused:
            block = self._unused.popleft()
        elif self._evictable:
            block, key = self._evictable.popitem(last=False)
            del self._block_of[key], self._key_of[block]
        else:
            return None
        assert self._users[block] == 0
        self._users[block] = 1
        return block

    def find(self, key: bytes) -> int | None:
        """The block registered under `key`, without taking it."""
        return self._block_of.get(key)

    def count_reusable(self, blocks: list[int]) -> int:
        """How many of these registered blocks count as free now and would not once they are shared."""
        return sum(self._users[block] == 0 for block in blocks)

    def share(self, block: int) -> None:
        """Adds a user to a registered block."""
        if self._users[block] == 0:
            del self._evictable[block]
        self._users[block] += 1

    def register(self, block: int, key: bytes) -> None:
        """Makes a full, computed block findable; a key that is taken already keeps its first block."""
        assert self._users[block] > 0
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def release(self, block: int) -> None:
        """Drops one user of a block."""
        assert self._users[block] > 0, f"block {block} has no user"
        self._users[block] -= 1
        if self._users[block] == 0:
            key = self._key_of.get(block)
            if key is None:
                self._unused.append(block)
            else:
                self._evictable[block] = key

    def forget_all(self) -> None:
        """Drops every reusable block; those that are held keep their keys."""
        for block, key in self._evictable.items():
            del self._block_of[key], self._key_of[block]
            self._unused.append(block)
        self._evictable.clear()
