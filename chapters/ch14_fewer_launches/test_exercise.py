"""The tests of chapter 14's exercise. The last two run a small model with random weights: no download, some seconds."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
from exercise import Decodes, pad
from torch import Tensor, nn

from minivllm.attention.base import KVSpec
from minivllm.attention.reference import ReferenceAttention
from minivllm.batch import InputBatch
from minivllm.compile.context import ForwardContext, forward_context
from minivllm.loading.load import load_model

SIZE, MAX_BLOCKS, NUM_BLOCKS = 4, 4, 50  # of a block; of a table; of the pool without the spare one
SPARE = NUM_BLOCKS
CAPTURED = (8, 1, 4, 2)


def decodes(*lengths: int) -> Decodes:
    """Requests of so many tokens, each in blocks of its own."""
    tables = [[5 * i + j for j in range(-(-n // SIZE))] for i, n in enumerate(lengths)]
    slots = [table[-1] * SIZE + (n - 1) % SIZE for n, table in zip(lengths, tables, strict=True)]
    return Decodes([10 + i for i in range(len(lengths))], [n - 1 for n in lengths], slots, list(lengths), tables)


def padded(step: Decodes) -> Decodes:
    return pad(step, CAPTURED, SPARE, SIZE, MAX_BLOCKS)


def num_rows(step: Decodes) -> set[int]:
    return {len(step.token_ids), len(step.positions), len(step.slots), len(step.lengths), len(step.tables)}


def test_a_step_gets_the_smallest_size_that_holds_it():
    for num, size in ((1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8)):
        assert num_rows(padded(decodes(*[6] * num))) == {size}


def test_a_step_that_is_larger_than_all_sizes_is_not_padded():
    step = decodes(*range(1, 10))
    assert padded(copy.deepcopy(step)) == step


def test_the_rows_that_were_there_stay_as_they_are():
    step = decodes(9, 1, 16, 5, 3)
    given = copy.deepcopy(step)
    found = padded(given)
    assert given == step
    for name in ("token_ids", "positions", "slots", "lengths"):
        assert getattr(found, name)[:5] == getattr(step, name)
    assert all(there[: len(was)] == was for there, was in zip(found.tables, step.tables, strict=False))


def test_shapes_follow_from_the_size_alone():
    for step in (decodes(1, 1, 1), decodes(16, 7, 12), decodes(4, 4, 4, 4)):
        assert [len(table) for table in padded(step).tables] == [MAX_BLOCKS] * 4


def test_what_is_added_writes_to_the_spare_block_and_reads_what_it_wrote():
    step = padded(decodes(9, 1, 16, 5, 3))
    assert len(step.slots) == 8
    for row in range(5, 8):
        table, length = step.tables[row], step.lengths[row]
        reads = [table[i // SIZE] * SIZE + i % SIZE for i in range(length)]
        assert reads == [step.slots[row]] and step.slots[row] // SIZE == SPARE
        assert step.positions[row] == length - 1


# ---------------------------------------------------------------------------------------- with a model

PROMPTS = [[7, 8, 9], [20] * 6, [3], [40, 41], [5, 6, 5, 6, 5]]
WANTED = [6, 1, 14, 10, 1]  # so that steps have five rows, then four, three, two and one


def test_padding_changes_no_answer_and_no_block():
    model = load_model("dummy:tiny", torch.float32, "cpu").model
    (plain, kept), (answers, pool) = serve(model, ()), serve(model, CAPTURED)
    assert answers == plain
    for before, after in zip(kept, pool, strict=True):
        torch.testing.assert_close(after[:, :SPARE], before[:, :SPARE], equal_nan=True)


def test_a_padded_row_computes_numbers():
    """Nothing was written to the pool but NaN: it would come out of a row that reads what is not there."""
    model = load_model("dummy:tiny", torch.float32, "cpu").model
    step = padded(decodes(1, 1, 1))
    caches = new_pool(model)
    assert len(step.token_ids) == 4 and forward(model, caches, step).isfinite().all()


def new_pool(model: nn.Module) -> list[Tensor]:
    shape = attention_of(model).kv_shape(NUM_BLOCKS + 1)
    return [torch.full(shape, torch.nan) for _ in model.attention_layers]


def attention_of(model: nn.Module) -> ReferenceAttention:
    layers = model.attention_layers
    spec = KVSpec(len(layers), layers[0].num_kv_heads, layers[0].head_size, SIZE, torch.float32)
    return ReferenceAttention(layers, spec, NUM_BLOCKS + 1, torch.device("cpu"))


@torch.inference_mode()
def forward(model: nn.Module, caches: list[Tensor], step: Decodes) -> Tensor:
    num = len(step.token_ids)
    tables = np.zeros((num, max(map(len, step.tables))), np.int32)
    for row, table in enumerate(step.tables):
        tables[row, : len(table)] = table
    batch = InputBatch(
        req_ids=[str(i) for i in range(num)],
        rows=np.arange(num),
        token_ids=np.array(step.token_ids),
        positions=np.array(step.positions),
        slot_mapping=np.array(step.slots),
        query_start=np.arange(num + 1, dtype=np.int32),
        seq_lens=np.array(step.lengths, np.int32),
        block_tables=tables,
        sample_tokens=np.arange(num),
        sample_requests=np.arange(num),
        draft_tokens=np.full(num, -1),
        num_tokens=num,
        max_query=1,
        max_seq=max(step.lengths),
    )
    attention = attention_of(model)
    with forward_context(ForwardContext(attention, attention.prepare(batch), caches, model.attention_layers)):
        return model(model.embed(torch.from_numpy(batch.token_ids)), torch.from_numpy(batch.positions))


def serve(model: nn.Module, sizes: Sequence[int]) -> tuple[list[list[int]], list[Tensor]]:
    """The answers, and the pool at the end. Every request computes one token a step, those of its prompt too."""
    caches, texts = new_pool(model), [list(prompt) for prompt in PROMPTS]
    tables = [[5 * i + j for j in range(MAX_BLOCKS)] for i in range(len(texts))]
    for at in range(SIZE * MAX_BLOCKS):
        live = [i for i, text in enumerate(texts) if at < len(PROMPTS[i]) + WANTED[i] - 1]
        if not live:
            break
        slots = [tables[i][at // SIZE] * SIZE + at % SIZE for i in live]
        own = [tables[i][: at // SIZE + 1] for i in live]
        step = Decodes([texts[i][at] for i in live], [at] * len(live), slots, [at + 1] * len(live), own)
        hidden = forward(model, caches, pad(step, sizes, SPARE, SIZE, MAX_BLOCKS))
        with torch.inference_mode():
            tokens = model.logits(hidden[: len(live)]).argmax(-1).tolist()
        for i, token in zip(live, tokens, strict=True):
            if at + 1 == len(texts[i]):
                texts[i].append(token)
    return [text[len(prompt) :] for text, prompt in zip(texts, PROMPTS, strict=True)], caches
