"""What decode steps read of their sequences, in buffers whose addresses never change; runs nothing."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch

from llm_svc.core import Scheduled
from llm_svc.decode_buckets import Bucket

_IDS, _LENGTHS, _SLOTS, _STATE_SLOTS = range(4)


class DecodeRows:
    """Token ids, lengths, slots, state slots and block tables of up to `most_rows` sequences, int32.

    A row that stands for no sequence has length 0, -1 as slot and state slot, and a table of -1. On a GPU the host's
    side is page-locked, and the device's side is filled by at most two copies a step. A block table only ever grows at
    its end while its sequence runs, so a row that had the same table before gets its new blocks alone.
    """

    def __init__(self, most_rows: int, most_blocks: int, block_size: int, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._block_size = block_size
        self._host = torch.zeros(4, most_rows, dtype=torch.int32, pin_memory=cuda)
        self._host_table = torch.full((most_rows * most_blocks,), -1, dtype=torch.int32, pin_memory=cuda)
        self._device = torch.zeros(4, most_rows, dtype=torch.int32, device=device)
        self._device_table = torch.full((most_rows * most_blocks,), -1, dtype=torch.int32, device=device)
        self._held: list[tuple[list[int] | None, int]] = []
        self._blocks = self._sent_rows = 0
        self._copied = torch.cuda.Event() if cuda else None

    def ids(self, bucket: Bucket) -> torch.Tensor:
        """[rows]: the token that each step computes."""
        return self._device[_IDS, : bucket.rows]

    def lengths(self, bucket: Bucket) -> torch.Tensor:
        """[rows]: tokens of the sequence, this one included."""
        return self._device[_LENGTHS, : bucket.rows]

    def slots(self, bucket: Bucket) -> torch.Tensor:
        """[rows]: the token's place in the caches."""
        return self._device[_SLOTS, : bucket.rows]

    def state_slots(self, bucket: Bucket) -> torch.Tensor:
        """[rows]."""
        return self._device[_STATE_SLOTS, : bucket.rows]

    def block_table(self, bucket: Bucket) -> torch.Tensor:
        """[rows, blocks]."""
        return self._device_table[: bucket.rows * bucket.blocks].view(bucket.rows, bucket.blocks)

    def fill(self, items: Rows[Scheduled], bucket: Bucket) -> None:
        """Writes a step of `items`, at most `bucket.rows` decode steps, and of padding behind them."""
        if self._copied is not None:
            # The copies of the step before have left the host's side.
            self._copied.synchronize()
        table_changed = self._fill_table(items, bucket)
        self._fill_numbers(items)
        self._device.copy_(self._host, non_blocking=True)
        if table_changed:
            used = bucket.rows * bucket.blocks
            self._device_table[:used].copy_(self._host_table[:used], non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def clear(self, bucket: Bucket) -> None:
        """A step of padding alone, which changes no cache."""
        self.fill((), bucket)

    def _fill_numbers(self, items: Rows[Scheduled]) -> None:
        ids, lengths, slots, state_slots = [], [], [], []
        for item in items:
            sequence, position = item.sequence, item.start
            ids.append(sequence.output_ids[position - len(sequence.prompt.ids)])
            lengths.append(position + 1)
            block, within = divmod(position, self._block_size)
            slots.append(sequence.blocks[block] * self._block_size + within)
            state_slots.append(sequence.state_slot)
        self._host[_IDS:_SLOTS] = 0
        self._host[_SLOTS:] = -1
        if items:
            self._host[:, : len(items)] = torch.tensor([ids, lengths, slots, state_slots], dtype=torch.int32)

    def _fill_table(self, items: Rows[Scheduled], bucket: Bucket) -> bool:
        """Whether the device lacks anything of it. Rows beyond the bucket stay as both sides have them."""
        table = self._host_table[: bucket.rows * bucket.blocks].view(bucket.rows, bucket.blocks)
        changed = False
        if bucket.blocks != self._blocks:
            self._host_table.fill_(-1)
            self._held, self._blocks, self._sent_rows = [], bucket.blocks, 0
        if bucket.rows > self._sent_rows:
            self._sent_rows, changed = bucket.rows, True
        self._held += [(None, 0)] * (bucket.rows - len(self._held))
        for row in range(bucket.rows):
            held, written = self._held[row]
            blocks = items[row].sequence.blocks if row < len(items) else None
            if blocks is not held:
                table[row, :written] = -1
                written, changed = 0, True
            count = len(blocks) if blocks is not None else 0
            if count > written:
                assert blocks is not None
                table[row, written:count] = torch.tensor(blocks[written:], dtype=torch.int32)
                changed = True
            self._held[row] = (blocks, count)
        return changed
