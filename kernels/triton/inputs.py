"""A step's inputs, gathered on the device from the state of all requests.

State lives in rows, one a request for as long as it runs: its tokens and its block table. A step names the rows that
take part and how many tokens of each; everything as long as the tokens or the tables is found here, so the host sends a
few numbers a request. The references: minivllm.kernels.reference.

No width or stride is specialised: these launches are too short for it to show, and a variant that a step asks for first
would be compiled while its requests wait.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_requests", "padded_tokens", "spare_slot", "token_stride", "table_stride"])
def gather_tokens_kernel(
    all_tokens,  # [rows, token_stride] int32
    all_tables,  # [rows, table_stride] int32
    rows,  # [num_requests] int64
    firsts,  # [num_requests] int64: the position of each one's first token of this step
    query_start,  # [num_requests + 1] int32
    token_ids,  # [padded_tokens] int64 out
    positions,  # [padded_tokens] int64 out
    slots,  # [padded_tokens] int64 out
    num_requests,
    padded_tokens,
    spare_slot,  # where padding tokens are written: token 0 at position 0
    token_stride,
    table_stride,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program BLOCK tokens, whose requests it finds by a binary search, all lanes at a time."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    request = tl.zeros([BLOCK], tl.int32)
    span = num_requests  # the request is one of request : request + span
    while span > 1:
        span = (span + 1) // 2
        middle = request + span
        begin = tl.load(query_start + middle, mask=middle < num_requests, other=2147483647)
        request = tl.where(begin <= at, middle, request)
    inside = at < tl.load(query_start + num_requests)
    row = tl.load(rows + request, mask=inside, other=0)
    position = tl.load(firsts + request, mask=inside, other=0) + at - tl.load(query_start + request)
    position = tl.where(inside, position, 0)
    token = tl.load(all_tokens + row * token_stride + position, mask=inside, other=0)
    block = tl.load(all_tables + row * table_stride + position // PAGE, mask=inside, other=0).to(tl.int64)
    slot = tl.where(inside, block * PAGE + position % PAGE, spare_slot)
    there = at < padded_tokens
    tl.store(token_ids + at, token.to(tl.int64), mask=there)
    tl.store(positions + at, position, mask=there)
    tl.store(slots + at, slot, mask=there)


@triton.jit(do_not_specialize=["width", "table_stride", "out_stride"])
def gather_rows_kernel(
    table,  # [all rows, table_stride] int32
    rows,  # [R] int64
    out,  # [R, out_stride] int32
    width,  # columns that are wanted
    table_stride,
    out_stride,
    BLOCK: tl.constexpr,
):
    """out[r, c] = table[rows[r], c]."""
    r = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + r)
    values = tl.load(table + row * table_stride + columns, mask=columns < table_stride, other=0)
    tl.store(out + r * out_stride + columns, values, mask=columns < width)


@triton.jit(do_not_specialize=["table_stride"])
def write_rows_kernel(
    table,  # [rows, table_stride] int32
    writes,  # [n, 5] int32: row, first column, its first value, number of values, columns to clear up to; all values
    table_stride,
    BLOCK: tl.constexpr,
):
    """One program a write. No two are of one row."""
    values = writes + 5 * tl.num_programs(0)
    write = writes + 5 * tl.program_id(0)
    row = tl.load(write).to(tl.int64)
    first = tl.load(write + 1)
    begin = tl.load(write + 2)
    count = tl.load(write + 3)
    end = tl.maximum(first + count, tl.load(write + 4))
    for start in range(first, end, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        new = tl.load(values + begin + columns - first, mask=columns < first + count, other=0)
        tl.store(table + row * table_stride + columns, new, mask=columns < end)
