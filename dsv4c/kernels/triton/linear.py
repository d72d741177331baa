"""linear and grouped_linear for many rows, on tensor cores.

bf16 x [T, groups * COLUMNS] times a stored matrix [groups * ROWS, COLUMNS] transposed, group by group, accumulated in
float32. The matrix is the left operand, so that its rows are decoded in registers on their way to the tensor cores;
e4m3 codes are exact in bf16, and so are their products with e8m0 scales; float32 scales go onto the sums of a block.

The grid is tiles (those of a row of tiles together), groups, stretches of the columns. With SPLIT each stretch writes
float32 sums of its own, [stretches, T, groups * ROWS], which `linear_sum.cu` adds.
"""

import triton
import triton.language as tl


@triton.jit
def linear(
    x,
    matrix,
    scales,  # the matrix again where it has none
    out,
    step,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    X_STRIDE: tl.constexpr,
    W_STRIDE: tl.constexpr,
    S_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,  # elements under one scale; 0: no scales
    BLOCK_COLS: tl.constexpr,
    EXPONENTS: tl.constexpr,  # scales are e8m0 bytes, else float32
    HEAD: tl.constexpr,  # the rows are the R that want logits, else the T of the step
    SPLIT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_K: tl.constexpr,
    INTERPRET: tl.constexpr = False,
):
    tokens = tl.load(step + 1) if HEAD else tl.load(step)
    token_tiles = (tokens + TILE_TOKENS - 1) // TILE_TOKENS
    tile = tl.program_id(0)
    if tile >= token_tiles * ((ROWS + TILE_ROWS - 1) // TILE_ROWS):
        return
    group = tl.program_id(1)
    first_row = tile // token_tiles * TILE_ROWS
    first_token = tile % token_tiles * TILE_TOKENS

    rows = first_row + tl.arange(0, TILE_ROWS)
    token = first_token + tl.arange(0, TILE_TOKENS)
    columns = tl.arange(0, TILE_K)
    # Past the end the last row is read again, and the result dropped.
    matrix_row = group * ROWS + tl.minimum(rows, ROWS - 1)
    x_row = tl.minimum(token, tokens - 1)
    steps = (COLUMNS + TILE_K - 1) // TILE_K
    stretch = (steps + tl.num_programs(2) - 1) // tl.num_programs(2)
    begin = tl.program_id(2) * stretch
    end = tl.minimum(begin + stretch, steps)

    w_pointers = matrix + matrix_row.to(tl.int64)[:, None] * W_STRIDE + (begin * TILE_K + columns)[None, :]
    x_pointers = x + x_row.to(tl.int64)[None, :] * X_STRIDE + (group * COLUMNS + begin * TILE_K + columns)[:, None]
    acc = tl.zeros((TILE_ROWS, TILE_TOKENS), dtype=tl.float32)
    for k in range(begin, end):
        if COLUMNS % TILE_K == 0:
            w = tl.load(w_pointers)
            v = tl.load(x_pointers)
        else:
            inside = k * TILE_K + columns < COLUMNS
            w = tl.load(w_pointers, mask=inside[None, :], other=0)
            v = tl.load(x_pointers, mask=inside[:, None], other=0.0)
        if BLOCK_ROWS > 0:
            # Sign and magnitude in the places of a bf16 are the value times 2^-120; both factors are exact in bf16.
            code = w.to(tl.uint16)
            code = ((code & 0x80) << 8) | ((code & 0x7F) << 4)
            s_pointers = scales + (matrix_row // BLOCK_ROWS) * S_STRIDE + k * TILE_K // BLOCK_COLS
            if EXPONENTS:
                exponent = tl.load(s_pointers).to(tl.uint32)
                # 2^-127 is subnormal in float32.
                scale = tl.where(exponent == 0, 0x00400000, exponent << 23).to(tl.float32, bitcast=True)
            else:
                scale = tl.load(s_pointers)
            if INTERPRET:
                # The interpreter multiplies the bits of bf16 operands, and decodes its subnormals wrongly.
                value = (code.to(tl.uint32) << 16).to(tl.float32, bitcast=True) * 1.329227995784916e36
                acc += tl.dot(value, v.to(tl.float32)) * scale[:, None]
            else:
                value = code.to(tl.bfloat16, bitcast=True) * tl.full((1,), 1.329227995784916e36, tl.bfloat16)
                if EXPONENTS:
                    # A power of two: exact in bf16 wherever the product is finite, but for subnormal ones.
                    acc = tl.dot(value * scale.to(tl.bfloat16)[:, None], v, acc)
                else:
                    acc += tl.dot(value, v) * scale[:, None]
        elif INTERPRET:
            acc += tl.dot(w.to(tl.float32), v.to(tl.float32))
        else:
            acc = tl.dot(w, v, acc)
        w_pointers += TILE_K
        x_pointers += TILE_K

    if SPLIT:
        out += tl.program_id(2).to(tl.int64) * tokens * OUT_STRIDE
    out_pointers = out + token.to(tl.int64)[None, :] * OUT_STRIDE + (group * ROWS + rows)[:, None]
    inside = (rows < ROWS)[:, None] & (token < tokens)[None, :]
    if INTERPRET and out.dtype.element_ty == tl.bfloat16:
        # The interpreter truncates.
        bits = acc.to(tl.uint32, bitcast=True)
        acc = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    tl.store(out_pointers, acc.to(out.dtype.element_ty), mask=inside)
