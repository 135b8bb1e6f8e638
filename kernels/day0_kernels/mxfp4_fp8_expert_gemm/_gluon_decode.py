"""MXFP4 codes in registers as the left operand of Hopper's matrix instruction, under one exponent a row; no product.

The order of x's columns (`fp8_quantise`) is chosen so that the 16 code bytes of a group, one load from shared memory,
are one thread's: it needs one table of magnitudes for them, and what it decodes is where the instruction wants it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def powers(first, last):
    """1, 2, 4 .. times `first`, below `last`."""
    found = []
    while first < last:
        found.append(first)
        first *= 2
    return found


@gluon.constexpr_function
def grouped_layout(rows, warps):
    """`[rows, 4, 16]`: a thread has the 16 bytes of one of a row's four groups, a row's threads are neighbours."""
    registers = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [8, 0, 0]]
    registers += [[row, 0, 0] for row in powers(16 * warps, rows)]
    lanes = [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    at_warps = [[row, 0, 0] for row in powers(16, 16 * warps)]
    return gl.DistributedLinearLayout(registers, lanes, at_warps, [], [rows, 4, 16])


@gluon.constexpr_function
def row_layout(rows, warps):
    """The same bytes as `[rows, 64]`."""
    grouped = grouped_layout(rows, warps)
    registers, lanes, at_warps = (
        [[row, 16 * group + byte] for row, group, byte in bases]
        for bases in (grouped.reg_bases, grouped.lane_bases, grouped.warp_bases)
    )
    return gl.DistributedLinearLayout(registers, lanes, at_warps, [], [rows, 64])


@gluon.jit
def magnitudes(scale, base):
    """e4m3 bytes, int32, of 0, .5, 1, 1.5 and of 2, 3, 4, 6 times 2^(scale - base - 6), as far as they are normal.

    `scale` uint8 `[ROWS, 4]`, `base` int32 `[ROWS, 1]`. An exponent out of range is that of a group of zeros only.
    """
    shift = gl.minimum(gl.maximum(scale.to(gl.int32) - base, 1), 12)
    return shift * 0x08080800 + 0x0C080000, shift * 0x08080808 + 0x1C181410


@gluon.jit
def decoded(codes, low, high, ROWS: gl.constexpr, WARPS: gl.constexpr, LEFT: gl.constexpr):
    """e4m3 `[ROWS, 128]`, in x's order, of `codes` uint8 `[ROWS, 64]`, four groups of each row.

    `low` and `high` int32 `[ROWS, 4]` as `magnitudes` gives them.
    """
    GROUPED: gl.constexpr = grouped_layout(ROWS, WARPS)
    shape = gl.full([ROWS, 4, 16], 0, gl.int32, GROUPED)
    low, _ = gl.broadcast(gl.expand_dims(low, 2), shape)
    high, _ = gl.broadcast(gl.expand_dims(high, 2), shape)
    grouped = gl.convert_layout(gl.reshape(codes, [ROWS, 4, 16]), GROUPED, assert_trivial=True)
    # As `triton_mxfp4.e4m3_words`, on four bytes that lie in one register: eight codes, the first four, the last four.
    first, last = gl.inline_asm_elementwise(
        """{
        .reg .b32 magnitude, raised, sign, other;
        and.b32 magnitude, $2, 0x77777777;
        prmt.b32 $0, $3, $7, magnitude;
        shr.u32 magnitude, magnitude, 16;
        prmt.b32 other, $3, $7, magnitude;
        shl.b32 raised, $2, 4;
        prmt.b32 sign, raised, $2, 0x7362;
        lop3.b32 $1, sign, 0x80808080, other, 0xEA;
        prmt.b32 sign, raised, $2, 0x5140;
        lop3.b32 $0, sign, 0x80808080, $0, 0xEA;
        }""",
        "=&r,=&r,r,r,r,r,r,r,r,r,r",
        [grouped, low, high],
        dtype=(gl.uint8, gl.uint8),
        is_pure=True,
        pack=4,
    )
    both = gl.reshape(gl.join(first, last), [ROWS, 4, 4, 4, 2])
    ordered = gl.reshape(gl.permute(both, (0, 2, 4, 1, 3)), [ROWS, 128])
    return gl.convert_layout(ordered, LEFT, assert_trivial=True).to(gl.float8e4nv, bitcast=True)


@gluon.jit
def prefetch_scales(scale_at, ROWS: gl.constexpr, K: gl.constexpr, WARPS: gl.constexpr):
    """Starts the scale bytes of a whole tile on their way to L2: too few to be worth a place in the steps' pipeline."""
    SECTORS: gl.constexpr = (K // 32 + 31) // 32
    WIDE: gl.constexpr = 1 if SECTORS == 1 else 2 if SECTORS == 2 else 4 if SECTORS <= 4 else 8
    LINES: gl.constexpr = gl.BlockedLayout([1, 1], [32 // WIDE, WIDE], [WARPS, 1], [1, 0])
    rows = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, LINES)) * (K // 32), 1)
    for begin in gl.static_range(0, SECTORS, WIDE):
        sectors = gl.minimum(begin + gl.arange(0, WIDE, gl.SliceLayout(0, LINES)), SECTORS - 1)
        places = scale_at + rows + gl.expand_dims(sectors * 32, 0)
        gl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [places.to(gl.int64, bitcast=True)],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )
