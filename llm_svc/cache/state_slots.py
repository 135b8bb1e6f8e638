"""Hands out rows for recurrent states and keeps snapshots of them at block boundaries; knows ids, never tensors."""

from __future__ import annotations

from collections import OrderedDict, deque


class StateSlots:
    """A fixed number of state rows, one per running sequence."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free: deque[int] = deque(range(num_slots))

    @property
    def free(self) -> int:
        """Number of rows nobody holds."""
        return len(self._free)

    def allocate(self) -> int | None:
        """A row of undefined content, or None when all are held."""
        return self._free.popleft() if self._free else None

    def release(self, slot: int) -> None:
        """Gives a row back."""
        assert slot not in self._free, f"state slot {slot} was free already"
        self._free.append(slot)


class Snapshots:
    """State rows kept by the key of the block that ends where the state was taken; the longest unused goes first."""

    def __init__(self, num_snapshots: int) -> None:
        self.num_snapshots = num_snapshots
        self._unused: deque[int] = deque(range(num_snapshots))
        self._row_of: OrderedDict[bytes, int] = OrderedDict()

    def find(self, key: bytes) -> int | None:
        """Row of the snapshot under `key`; finding it makes it the most recently used."""
        row = self._row_of.get(key)
        if row is not None:
            self._row_of.move_to_end(key)
        return row

    def __contains__(self, key: bytes) -> bool:
        return key in self._row_of

    def reserve(self, instead_of: bytes | None = None) -> int | None:
        """A row to write into, or None where snapshots are off; name it with `register` once it is written.

        A snapshot under `instead_of` gives its row first: a growing answer then keeps one snapshot, not one a block.
        """
        if instead_of is not None and instead_of in self._row_of:
            return self._row_of.pop(instead_of)
        if self._unused:
            return self._unused.popleft()
        if not self._row_of:
            return None
        _, row = self._row_of.popitem(last=False)
        return row

    def register(self, key: bytes, row: int) -> None:
        """Makes a written row findable."""
        if key in self._row_of:
            self._unused.append(row)
        else:
            self._row_of[key] = row

    def forget_all(self) -> None:
        """Frees every row."""
        self._unused.extend(self._row_of.values())
        self._row_of.clear()

    def discard(self, row: int) -> None:
        """Gives back a reserved row that was never written."""
        self._unused.append(row)
