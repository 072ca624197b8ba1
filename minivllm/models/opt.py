"""OPT (Zhang et al. 2022): learnt positions that begin with the table's third row; norms before each sublayer, or
behind it, with projections around the embeddings (350M)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from minivllm.layers import sharded
from minivllm.layers.linear import Linear
from minivllm.models.checkpoint import WeightMap
from minivllm.models.classic import ClassicDecoder, Rotate, SequentialLayer, plain, qkv
from minivllm.models.classic_config import ClassicSpec, read_classic, renamed
from minivllm.models.decoder import make_lm_head
from minivllm.models.spec import ConfigReader
from minivllm.parallel.group import ONE_DEVICE, Ranks

FIRST = 2  # row of the table of positions
DEFAULTS = {  # OPTConfig's
    "vocab_size": 50272,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 2048,
    "num_attention_heads": 12,
    "hidden_act": "relu",
    "layer_norm_eps": 1e-5,  # torch's: a config does not say
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OPTSpec(ClassicSpec):
    norm_before: bool  # each sublayer, or else behind it
    last_norm: bool
    embedding_size: int  # else than hidden_size: projected to it, and back again before the LM head


def read_config(reader: ConfigReader, architecture: str) -> OPTSpec:
    reader = renamed(reader, {"intermediate_size": "ffn_dim", "hidden_act": "activation_function"}, DEFAULTS)
    config = reader.config
    if not config.get("layer_norm_elementwise_affine", True):
        raise reader.fail("layer_norm_elementwise_affine=false is not supported: a norm has a weight and a bias")
    bias, before = bool(config.get("enable_bias", True)), bool(config.get("do_layer_norm_before", True))
    return read_classic(
        reader,
        architecture,
        OPTSpec,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        num_positions=reader.need("max_position_embeddings") + FIRST,
        norm_before=before,
        last_norm=before and not config.get("_remove_final_layer_norm", False),
        embedding_size=reader.optional("word_embed_proj_dim", reader.need("hidden_size")),
    )


ENDS = {
    "model.decoder.embed_tokens": "embedding",
    "model.decoder.embed_positions": "position",
    "model.decoder.project_in": "project_in",
    "model.decoder.project_out": "project_out",
    "model.decoder.final_layer_norm": "norm",
    "lm_head": "lm_head",
}
LAYER = {
    "self_attn_layer_norm": "attention_norm",
    "self_attn.out_proj": "attention.o",
    "final_layer_norm": "mlp_norm",
    "fc1": "mlp.up",
    "fc2": "mlp.down",
}


class PostNormLayer(SequentialLayer):
    """Each norm behind its sublayer and the sum."""

    def forward(self, x: Tensor, rotate: Rotate) -> Tensor:
        x = self.attention_norm(x + self.attention(x, rotate))
        return self.mlp_norm(x + self.mlp(x))


class OPTModel(ClassicDecoder):
    first_position = FIRST

    def __init__(self, spec: OPTSpec, dtype: torch.dtype, device: torch.device, ranks: Ranks = ONE_DEVICE):
        super().__init__(spec, dtype, device, ranks)
        at, sizes = ranks.placement, (spec.hidden_size, spec.embedding_size)
        if not spec.last_norm and at.is_last_stage:
            self.norm = nn.Identity()
        if sizes[0] == sizes[1]:
            return
        with device:
            if at.is_first_stage:
                self.embedding = sharded.first_of_stage(ranks, spec.vocab_size, spec.embedding_size, dtype)
                self.project_in = Linear(sizes[1], {"": sizes[0]}, dtype=dtype, method=self.linear_method)
            if at.is_last_stage:
                narrow = replace(spec, hidden_size=spec.embedding_size)
                self.project_out = Linear(sizes[0], {"": sizes[1]}, dtype=dtype, method=self.linear_method)
                self.lm_head = make_lm_head(narrow, self.embedding, dtype, self.linear_method, ranks)

    @staticmethod
    def weights_of(spec: OPTSpec) -> WeightMap:
        return WeightMap(plain(ENDS), plain(LAYER) | qkv("self_attn.{}_proj"), "model.decoder.layers")

    def layer_of(self, spec: OPTSpec) -> type[nn.Module]:
        return SequentialLayer if spec.norm_before else PostNormLayer

    def embed(self, token_ids: Tensor, out: Tensor | None = None) -> Tensor:
        """token_ids [T] int64 -> x [T, hidden], in `out` if that is given."""
        if not hasattr(self, "project_in"):
            return super().embed(token_ids, out)
        x = self.project_in(self.embedding(token_ids))
        return x if out is None else out.copy_(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [S, hidden] -> [S, vocab] in fp32."""
        return super().logits(self.project_out(hidden) if hasattr(self, "project_out") else hidden)
