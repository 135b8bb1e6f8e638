"""Which sequence a part of a packed call belongs to, inside Triton kernels; it does not know what is computed.

A part is a run of up to TOKENS tokens of one sequence. Sequence b owns the part numbers from
`cu_seqlens[b] // TOKENS + b` on: always enough for its tokens, known without a prefix sum and without reading lengths
back to the host. A call has `T // TOKENS + B` numbers, of which some are of no token.
"""

from __future__ import annotations

import triton
import triton.language as tl

_WIDTH = tl.constexpr(256)


@triton.jit
def sequence_of_part(cu_seqlens, sequences, part, TOKENS: tl.constexpr):
    """(sequence, its first token, its end, first token of the part); the last may be the end or beyond."""
    lane = tl.arange(0, _WIDTH)
    sequence = -1
    for base in range(0, sequences, _WIDTH):
        b = base + lane
        bounds = tl.load(cu_seqlens + b, mask=b < sequences, other=0)
        sequence += tl.sum(((b < sequences) & (bounds // TOKENS + b <= part)).to(tl.int32), axis=0)
    begin = tl.load(cu_seqlens + sequence)
    end = tl.load(cu_seqlens + sequence + 1)
    return sequence, begin, end, begin + (part - begin // TOKENS - sequence) * TOKENS


@triton.jit
def first_part(sequence, begin, TOKENS: tl.constexpr):
    """Number of the first part of a sequence that begins at token `begin`."""
    return begin // TOKENS + sequence
