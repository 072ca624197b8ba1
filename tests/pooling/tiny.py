"""Small random models in the folders that sentence-transformers and transformers write."""

from __future__ import annotations

import json
import string
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoModel, AutoModelForCausalLM, BertConfig, BertForSequenceClassification, BertModel

from minivllm.loading.dummy import write_tokenizer

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = [*string.ascii_lowercase, *string.digits, *".,?!'-"]
VOCAB = [*SPECIAL, *LETTERS, *("##" + letter for letter in LETTERS), "the", "sea", "##s", "##ing", "is"]
BERT = {
    "vocab_size": len(VOCAB),
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # large, so that attention tells tokens apart
}
TEXTS = ["the sea", "a", "is the sea singing?", "x" * 40, "dogs, cats and 12 mice", "the sea is the sea is the sea"]


def bert_tokenizer() -> Tokenizer:
    """WordPiece over lower-cased letters, [CLS] and [SEP] around a text."""
    tokenizer = Tokenizer(models.WordPiece({token: i for i, token in enumerate(VOCAB)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def randomise(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Every parameter random: biases and norms too, which transformers starts at 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name.lower():
                parameter.uniform_(0.5, 1.5, generator=generator)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.3, generator=generator)
            else:
                parameter.normal_(0, 0.2, generator=generator)
    return model.eval()


def write_bert(folder: Path, num_labels: int = 0, **changes) -> BertModel | BertForSequenceClassification:
    """The folder's model; num_labels: with a classification head."""
    config = BertConfig(**(BERT | changes), **({"num_labels": num_labels} if num_labels else {}))
    model = randomise(BertForSequenceClassification(config) if num_labels else BertModel(config))
    model.save_pretrained(folder)
    bert_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"cls_token": "[CLS]", "sep_token": "[SEP]"}))
    return model


def write_modules(
    folder: Path, *steps: str, limit: int | None = None, prompts: object = None, default: str | None = None, **pooling
) -> None:
    """modules.json and what it names; prompts: with sentence-transformers' file of them; pooling: fields of the Pooling
    step's file."""
    kinds = [f"sentence_transformers.models.{step}" for step in steps]
    paths = ["", *(f"{i}_{step}" for i, step in enumerate(steps[1:], 1))]
    modules = [{"type": kind, "path": path} for kind, path in zip(kinds, paths, strict=True)]
    (folder / "modules.json").write_text(json.dumps(modules))
    if len(steps) > 1:
        (folder / paths[1]).mkdir(exist_ok=True)
        (folder / paths[1] / "config.json").write_text(json.dumps(pooling))
    if prompts is not None:
        about = {"prompts": prompts, "default_prompt_name": default, "similarity_fn_name": "cosine"}
        (folder / "config_sentence_transformers.json").write_text(json.dumps(about))
    if limit is not None:
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": limit, "do_lower_case": False}))


def write_decoder(folder: Path, config) -> torch.nn.Module:
    """transformers' model without its LM head."""
    randomise(AutoModelForCausalLM.from_config(config)).save_pretrained(folder)
    write_tokenizer(folder, config.vocab_size)
    return AutoModel.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def hidden_of(oracle: torch.nn.Module, token_ids: list[int]) -> torch.Tensor:
    """[T, hidden] by transformers, one text at a time: no padding and no mask."""
    return oracle(torch.tensor([token_ids])).last_hidden_state[0]
