"""Which experts of one layer are on the device, and which goes first; it holds no weight."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SlotUse:
    """An expert in a slot for one part of a call; a missing one has to be copied there first."""

    expert: int
    slot: int
    missing: bool


class ExpertSlots:
    """The least recently used expert leaves first. One of these for each layer, not one shared by all.

    A forward visits the layers in a cycle. Shared slots fewer than the experts that a whole forward takes would then
    lose each expert just before its layer comes round again, the worst case of LRU: no hit at all. Within a layer an
    expert competes with those that the same layer's gate preferred for earlier tokens, so a few slots already pay.
    The price is that a layer with few favourites cannot lend its slots.
    """

    def __init__(self, slots: int) -> None:
        assert slots > 0
        self._slots = slots
        self._slot_of: OrderedDict[int, int] = OrderedDict()

    @property
    def resident(self) -> tuple[int, ...]:
        """Experts on the device, the least recently used first."""
        return tuple(self._slot_of)

    def groups(self, active: list[int]) -> Iterator[list[SlotUse]]:
        """All `active` experts in groups that fit the slots; a group is valid until the next one is asked for.

        Those already on the device come first: bringing in others could otherwise push them out before their turn.
        """
        order = sorted(active, key=lambda expert: (expert not in self._slot_of, expert))
        for begin in range(0, len(order), self._slots):
            yield self._take(order[begin : begin + self._slots])

    def _take(self, experts: list[int]) -> list[SlotUse]:
        hits = [expert for expert in experts if expert in self._slot_of]
        # Touched before anything leaves: what leaves is then none of this group.
        for expert in hits:
            self._slot_of.move_to_end(expert)
        uses = [SlotUse(expert, self._slot_of[expert], missing=False) for expert in hits]
        for expert in experts:
            if expert not in self._slot_of:
                free = len(self._slot_of) < self._slots
                slot = len(self._slot_of) if free else self._slot_of.popitem(last=False)[1]
                self._slot_of[expert] = slot
                uses.append(SlotUse(expert, slot, missing=True))
        return uses
