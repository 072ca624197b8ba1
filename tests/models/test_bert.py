"""Rule: loaded from the same folder, our encoder computes what transformers computes."""

from __future__ import annotations

import pytest
import torch
from pooling.tiny import BERT, hidden_of, write_bert
from safetensors.torch import load_file, save_file
from tolerances import HIDDEN

from minivllm.attention.packed import PackedAttention
from minivllm.compile.context import ForwardContext, forward_context
from minivllm.errors import ModelError
from minivllm.loading import load, load_model, resolve
from minivllm.models import read_spec

CPU = torch.device("cpu")
LENGTHS = [1, 2, 9, 30, 31, 64]


def our_hidden(model, token_ids: list[list[int]], types: list[int] | None = None) -> torch.Tensor:
    attention, layers = PackedAttention(model.attention_layers, CPU), model.attention_layers
    inputs = [[t for ids in token_ids for t in ids], [p for ids in token_ids for p in range(len(ids))]]
    inputs += [types] if types is not None else []
    meta = attention.prepare_lengths([len(ids) for ids in token_ids])
    context = ForwardContext(attention, meta, [torch.empty(0)] * len(layers), layers)
    with torch.inference_mode(), forward_context(context):
        ids, positions, *types = map(torch.tensor, inputs)
        return model(model.embed(ids, None, *types), positions)


def random_ids(lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(BERT["vocab_size"], (n,), generator=generator).tolist() for n in lengths]


def loaded(folder, dtype=torch.float32):
    return load(resolve(str(folder)), dtype, CPU).model


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "gelu_pytorch_tanh", "relu"])
def test_hidden_states_in_fp32_equal_transformers(tmp_path, activation):
    oracle = write_bert(tmp_path, hidden_act=activation)
    token_ids = random_ids(LENGTHS)
    expected = torch.cat([hidden_of(oracle, ids) for ids in token_ids])
    assert expected.std() > 0.5  # the comparison means something
    torch.testing.assert_close(our_hidden(loaded(tmp_path), token_ids), expected, rtol=0, atol=HIDDEN)


def test_the_activations_differ_so_that_the_test_above_can_fail(tmp_path):
    oracle = write_bert(tmp_path, hidden_act="relu")
    token_ids = random_ids([30])
    expected = hidden_of(oracle, token_ids[0])
    write_bert(tmp_path, hidden_act="gelu")
    assert (our_hidden(loaded(tmp_path), token_ids) - expected).abs().max() > 100 * HIDDEN


@pytest.mark.parametrize("num_labels", [1, 3])
def test_a_heads_logits_equal_transformers_for_pairs(tmp_path, num_labels):
    oracle = write_bert(tmp_path, num_labels)
    ids, types = random_ids([20])[0], [0] * 8 + [1] * 12
    with torch.inference_mode():
        expected = oracle(torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits
    model = loaded(tmp_path)
    with torch.inference_mode():
        found = model.classify(our_hidden(model, [ids], types)[:1])
    torch.testing.assert_close(found, expected, rtol=0, atol=HIDDEN)


def test_bf16_runs_near_fp32(tmp_path):
    oracle, ids = write_bert(tmp_path), random_ids([30])
    error = our_hidden(loaded(tmp_path, torch.bfloat16), ids).float() - hidden_of(oracle, ids[0])
    assert error.norm() / hidden_of(oracle, ids[0]).norm() < 0.05


def test_a_checkpoint_that_lacks_a_tensor_or_has_one_too_many_is_refused(tmp_path):
    write_bert(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    spare = tensors.pop("encoder.layer.1.output.dense.bias")
    save_file(tensors, path)
    with pytest.raises(ModelError, match="encoder.layer.1.output.dense.bias"):
        loaded(tmp_path)
    save_file({**tensors, "encoder.layer.1.output.dense.bias": spare, "more": spare.clone()}, path)
    with pytest.raises(ModelError, match='do not belong to BertModel: "more"'):
        loaded(tmp_path)


def test_an_engine_that_generates_does_not_load_it(tmp_path):
    write_bert(tmp_path)
    with pytest.raises(ModelError, match="BertModel reads texts and cannot generate"):
        load_model(str(tmp_path), torch.float32, CPU)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "swish"}, 'hidden_act "swish"'),
        ({"position_embedding_type": "relative_key"}, "relative_key"),
        ({"num_attention_heads": 5}, "5 heads do not divide"),
        ({"hidden_size": None}, '"hidden_size" must be a positive int'),
        ({"is_decoder": True}, "is_decoder"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(changes, message):
    with pytest.raises(ModelError, match=message):
        read_spec({"architectures": ["BertModel"], **BERT, **changes})


def test_a_config_without_architectures_is_known_by_its_model_type():
    assert read_spec({"model_type": "bert", **BERT}).architecture == "BertModel"
