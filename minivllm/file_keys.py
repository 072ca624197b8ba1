"""The keys of the files beside the weights: which of them say nothing about the result, and which must not say more.

A key is followed, by the code that reads it; or it stands in a table here, harmless for a reason, or with the only
values that change nothing, any other being refused by name. What is neither is named in one warning. Keys are those
that the formats' own writers have: transformers' configurations and tokenizers, llama.cpp's converter (the gguf
package), PEFT.
"""

from __future__ import annotations

import logging
import re
import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from minivllm.errors import ModelError

logger = logging.getLogger("minivllm")
SHOWN = 20  # keys in a warning


class Table(NamedTuple):
    harmless: Mapping[str, str]  # {key: why}
    only: Mapping[str, Sequence[Any]] = {}  # {key: values that change nothing}


def check(where: str, given: Mapping[str, Any], followed: Collection[str], *tables: Table) -> list[str]:
    """The keys of a file that nothing is known of. tables: a family's before those of all. Raises ModelError for a
    value that is not followed, and names its key."""
    unknown = []
    for key, value in given.items():
        if key in followed:
            continue
        table = next((table for table in tables if key in table.only or key in table.harmless), None)
        if table is None:
            unknown.append(key)
        elif key in table.only and not _is_among(value, table.only[key]):
            raise ModelError(f"{where}: {key}={reprlib.repr(value)} is not supported: it would change the result")
    return unknown


def warn(where: str, unknown: Collection[str]) -> None:
    """One line, if there is anything to say."""
    if unknown:
        more = f" and {len(unknown) - SHOWN} more" if len(unknown) > SHOWN else ""
        named = ", ".join(key[:100] for key in [*unknown][:SHOWN])
        logger.warning("%s: keys that this version does not know are not followed: %s%s", where, named, more)


def _is_among(value: Any, fine: Sequence[Any]) -> bool:
    value = [*value] if isinstance(value, memoryview) else value
    return any(value == one and isinstance(value, bool) <= isinstance(one, bool | int) for one in fine)


def _table(harmless: Mapping[str, str], only: Mapping[str, Sequence[Any]] | None = None) -> Table:
    """harmless: {why: keys}."""
    return Table({key: why for why, keys in harmless.items() for key in keys.split()}, only or {})


OFF = (None, False)
NONE = (None, [], {}, "", 0, False)

# ---------------------------------------------------------------------------------------------- generation_config.json

_SAMPLING = {
    "a request says how its tokens are chosen": "do_sample temperature top_k top_p min_p top_h typical_p "
    "epsilon_cutoff eta_cutoff repetition_penalty length_penalty diversity_penalty penalty_alpha num_beams "
    "num_beam_groups "
    "num_return_sequences early_stopping exponential_decay_length_penalty max_length max_new_tokens min_length "
    "min_new_tokens max_time low_memory renormalize_logits",
    "how transformers runs it, or what it returns": "use_cache cache_implementation cache_config max_cache_len "
    "output_attentions output_hidden_states output_scores output_logits return_dict_in_generate compile_config "
    "disable_compile continuous_batching_config prefill_chunk_size remove_invalid_values generation_kwargs "
    "use_mtp is_assistant num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold "
    "prompt_lookup_num_tokens max_matching_ngram_size assistant_early_exit assistant_lookbehind target_lookbehind "
    "assistant_ensemble_weight speculation_type",
    "who wrote it": "transformers_version _from_model_config _commit_hash",
    "of other tokens than those that a request sends": "pad_token_id decoder_start_token_id",
}
# What decides which tokens an answer may have.
_CONSTRAINTS: Mapping[str, Sequence[Any]] = {
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), (None, [], [-1])),
    **dict.fromkeys(("bad_words_ids", "force_words_ids", "constraints", "sequence_bias", "stop_strings"), NONE),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "forced_decoder_ids"), NONE),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), NONE),
    **dict.fromkeys(("token_healing", "watermarking_config", "dola_layers"), NONE),
    **dict.fromkeys(("guidance_scale", "encoder_repetition_penalty"), (None, 1)),
}
GENERATION = _table(_SAMPLING, _CONSTRAINTS)
GENERATION_OF = {
    "whisper": _table(
        {
            "the prompt of a transcript says it": "forced_decoder_ids lang_to_id task_to_id language task "
            "no_timestamps_token_id prev_sot_token_id return_timestamps max_initial_timestamp_index",
            "of times of words, which are not told": "alignment_heads median_filter_width",
        }
    )
}
GENERATION_READ = ("bos_token_id", "eos_token_id")
GENERATION_READ_OF = {"whisper": ("suppress_tokens", "begin_suppress_tokens", "is_multilingual")}

# --------------------------------------------------------------------------------------------------------- config.json

CONFIG = _table(
    {
        **_SAMPLING,
        "of training": "attention_dropout hidden_dropout dropout activation_dropout attn_pdrop embd_pdrop resid_pdrop "
        "embedding_dropout residual_dropout classifier_dropout hidden_dropout_prob attention_probs_dropout_prob "
        "layerdrop encoder_layerdrop decoder_layerdrop initializer_range initializer_factor init_std "
        "router_aux_loss_coef router_jitter_noise output_router_logits aux_loss_alpha seq_aux gradient_checkpointing "
        "pretraining_tp ep_size unsloth_fixed unsloth_version",
        "how transformers runs, finds or saves it": "return_dict model_type _name_or_path name_or_path auto_map "
        "torch_dtype dtype architectures torchscript use_bfloat16 _attn_implementation attn_implementation "
        "_attn_implementation_internal _attn_implementation_autoset _experts_implementation chunk_size_feed_forward "
        "tf_legacy_loss use_flash_attn slow_but_exact reorder_and_upcast_attn tokenizer_class processor_class "
        "torch_compile is_llama_config",
        "of heads for other tasks": "problem_type id2label label2id num_labels finetuning_task task_specific_params "
        "summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj",
        "who fills a batch": "sep_token_id prefix",
        "read beside this table": "quantization_config bos_token_id eos_token_id",
        "an older name of what rope_parameters says": "rope_scaling rope_theta",
    },
    {
        **_CONSTRAINTS,
        **dict.fromkeys(("is_encoder_decoder", "add_cross_attention", "tie_encoder_decoder", "is_decoder"), OFF),
        "cross_attention_hidden_size": (None,),
        "pruned_heads": NONE,
        "partial_rotary_factor": (None, 1),
        "num_nextn_predict_layers": (None, 0),
    },
)
_NO_WINDOW = _table({"of windows, which a switch leaves off": "sliding_window max_window_layers"})
CONFIG_OF = {
    "qwen2": _NO_WINDOW,
    "qwen3": _NO_WINDOW,
    **dict.fromkeys(
        ("qwen2_moe", "qwen3_moe"),
        _table({"of windows, which are refused if a switch is on": "sliding_window max_window_layers"}),
    ),
    "gemma2": _table({"hidden_activation says it": "hidden_act"}),
    "gemma3_text": _table(
        {
            "read as sliding_window_pattern, or in layer_types": "_sliding_window_pattern",
            "hidden_activation says it": "hidden_act",
        }
    ),
    "gpt2": _table({"n_positions says it": "n_ctx"}),
    "gptj": _table({"n_positions says it": "n_ctx", "all of its models have it": "rotary scale_attn_weights"}),
    "bloom": _table(
        {
            "how its first code computed the same": "skip_bias_add skip_bias_add_qkv attention_softmax_in_fp32 "
            "masked_softmax_fusion bias_dropout_fusion offset_alibi",
            "ALiBi has no longest": "seq_length",
            "the tokenizer says it": "unk_token_id",
        }
    ),
    "gpt_neox": _table({"its attention looks back anyway": "is_decoder"}),
    "bert": _table({"the embeddings are not used behind": "tie_word_embeddings"}),
    "falcon": _table({"of its newer architecture, or of the older one": "num_kv_heads multi_query parallel_attn"}),
    "smollm3": _table({"no_rope_layers says it": "no_rope_layer_interval sliding_window max_window_layers"}),
    "deepseek_v2": _table(
        {
            "what the sizes of q and K add up to": "head_dim qk_head_dim",
            "of groups of experts, which topk_method=greedy has not": "n_group topk_group",
        }
    ),
    "deepseek_v3": _table({"what the sizes of q and K add up to": "head_dim qk_head_dim"}),
    "granitemoehybrid": _table({"how many tokens of a state are computed together": "mamba_chunk_size"}),
    "qwen3_5": _table(
        {
            "of seeing, which is left in the file": "vision_config image_token_id video_token_id vision_start_token_id "
            "vision_end_token_id",
            "of guessing tokens, which is left in the file": "mtp_num_hidden_layers mtp_use_dedicated_embeddings",
        }
    ),
    "whisper": Table(
        _table(
            {
                "of training": "apply_spec_augment mask_feature_length mask_feature_min_masks mask_feature_prob "
                "mask_time_length mask_time_min_masks mask_time_prob",
                "of classes of sound, and of times of words": "classifier_proj_size use_weighted_layer_sum "
                "median_filter_width",
                "generation_config.json says it, and the prompt": "suppress_tokens begin_suppress_tokens "
                "forced_decoder_ids decoder_start_token_id",
            }
        ).harmless,
        {"is_encoder_decoder": (None, True)},
    ),
}

ROPE_READ = ("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor")
ROPE_READ += ("high_freq_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate")
ROPE_READ += ("partial_rotary_factor", "short_factor")
ROPE = _table(
    {
        "of longer contexts than are served": "long_factor",
        "of places in pictures": "mrope_section mrope_interleaved",
        "of training": "finetuned",
    }
)

# ----------------------------------------------------------------------------------------------- tokenizer_config.json

TOKENIZER = _table(
    {
        "tokenizer.json has it": "added_tokens_decoder additional_special_tokens extra_special_tokens sp_model_kwargs "
        "legacy from_slow model_specific_special_tokens do_basic_tokenize never_split keep_accents fix_mistral_regex "
        "vocab_file merges_file tokenizer_file special_tokens_map_file normalizer_file vocab_size vocab_type "
        "add_bos_token errors trim_offsets wordpieces_prefix remove_space fuse_unk byte_fallback",
        "how batches are filled and cut": "model_max_length padding padding_side truncation truncation_side max_length "
        "stride truncation_strategy pad_to_multiple_of pad_token_type_id pad_token_type_ids model_input_names "
        "return_token_type_ids max_len",
        "text is what its tokens stand for, byte by byte": "clean_up_tokenization_spaces spaces_between_special_tokens "
        "decode_with_prefix_space",
        "how transformers finds or saves it": "tokenizer_class processor_class auto_map name_or_path backend is_local "
        "local_files_only use_fast tokenizer_type feature_extractor_type image_processor_type device_map",
        "of templates that models had before theirs": "use_default_system_prompt",
        "of Whisper's prompts, which requests say": "language task predict_timestamps",
        "of answers that are read again": "response_schema",
        "of other inputs than text": "image_token video_token audio_token boi_token eoi_token",
    },
    {"split_special_tokens": OFF},
)
TOKENIZER_READ = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
TOKENIZER_READ += ("add_bos_token", "chat_template")
# What tokenizer.json says as well: {key: (a part of it, its field there)}. Where they differ, one of them is wrong.
TOKENIZER_SAYS = {
    "add_prefix_space": ("ByteLevel", "add_prefix_space"),
    "do_lower_case": ("BertNormalizer", "lowercase"),
    "strip_accents": ("BertNormalizer", "strip_accents"),
    "tokenize_chinese_chars": ("BertNormalizer", "handle_chinese_chars"),
}

# -------------------------------------------------------------------------------------------- preprocessor_config.json

PREPROCESSOR = _table(
    {
        "how transformers finds or saves it": "feature_extractor_type processor_class image_processor_type auto_map",
        "computed from the others": "mel_filters n_samples nb_max_frames",
        "the encoder hears silence where nothing is": "return_attention_mask",
    },
    {"padding_value": (0,), "padding_side": ("right",), "dither": (0,), "do_normalize": OFF, "n_fft": (400,)},
)

# ---------------------------------------------------------------------------------------------------------------- GGUF

_ZERO = (0, False)
_ONE = (0, 1)  # llama.cpp takes 0 as not said
GGUF = _table(
    {
        "of the file, and of whom it is": "general.quantization_version general.file_type general.name general.author "
        "general.version general.organization general.finetune general.basename general.description "
        "general.quantized_by general.size_label general.license general.license.name general.license.link general.url "
        "general.doi general.uuid general.repo_url general.source.url general.source.doi general.source.uuid "
        "general.source.repo_url general.base_model.count general.dataset.count general.tags general.languages "
        "general.datasets general.source.huggingface.repository split.no split.tensors.count "
        "general.base_model.{id}.name general.base_model.{id}.author general.base_model.{id}.version "
        "general.base_model.{id}.organization general.base_model.{id}.description general.base_model.{id}.url "
        "general.base_model.{id}.doi general.base_model.{id}.uuid general.base_model.{id}.repo_url "
        "general.dataset.{id}.name general.dataset.{id}.author general.dataset.{id}.version "
        "general.dataset.{id}.organization general.dataset.{id}.description general.dataset.{id}.url "
        "general.dataset.{id}.doi general.dataset.{id}.uuid general.dataset.{id}.repo_url",
        "how it was quantised": "quantize.imatrix.file quantize.imatrix.dataset quantize.imatrix.entries_count "
        "quantize.imatrix.chunks_count",
        "a request says how its tokens are chosen": "general.sampling.sequence general.sampling.top_k "
        "general.sampling.top_p general.sampling.min_p general.sampling.xtc_probability general.sampling.xtc_threshold "
        "general.sampling.temp general.sampling.penalty_last_n general.sampling.penalty_repeat "
        "general.sampling.mirostat general.sampling.mirostat_tau general.sampling.mirostat_eta",
        "the tensors say it": "{arch}.vocab_size {arch}.tensor_data_layout",
        "said again by other keys": "tokenizer.huggingface.json tokenizer.ggml.token_type_count "
        "{arch}.rope.scaling.finetuned {arch}.rope.scale_linear",
        "of another kind of vocabulary": "tokenizer.ggml.scores tokenizer.ggml.merges tokenizer.ggml.pre "
        "tokenizer.ggml.add_space_prefix",
        "of norms of another kind": "{arch}.attention.layer_norm_epsilon {arch}.attention.layer_norm_rms_epsilon",
        "the names of templates, which have keys of their own": "tokenizer.chat_templates",
        "no text that is generated has them": "tokenizer.ggml.seperator_token_id tokenizer.ggml.mask_token_id "
        "tokenizer.ggml.cls_token_id",
    },
    {
        "general.type": ("model",),
        "split.count": (0, 1),
        "{arch}.attention.causal": (True,),
        "{arch}.pooling_type": (0, 3),  # none, and the last token's state, which a decoder gives
        **dict.fromkeys(
            (
                *("{arch}.logit_scale", "{arch}.residual_scale", "{arch}.embedding_scale", "{arch}.rope.scaling.alpha"),
                *("{arch}.rope.scaling.attn_factor", "{arch}.rope.scaling.yarn_attn_factor"),
                *("{arch}.expert_weights_scale", "{arch}.rope.scaling.yarn_ext_factor"),
            ),
            _ONE,
        ),
        **dict.fromkeys(
            (
                *(f"{{arch}}.attention.{name}" for name in ("max_alibi_bias", "clamp_kqv", "group_norm_epsilon")),
                *(f"{{arch}}.attention.{name}" for name in ("group_norm_groups", "q_lora_rank", "kv_lora_rank")),
                *(f"{{arch}}.attention.{name}" for name in ("decay_lora_rank", "iclr_lora_rank", "gate_lora_rank")),
                *(f"{{arch}}.attention.{name}" for name in ("value_residual_mix_lora_rank", "shared_kv_layers")),
                *(f"{{arch}}.attention.{name}" for name in ("relative_buckets_count", "sliding_window", "scale")),
                *(f"{{arch}}.attention.{name}" for name in ("output_scale", "temperature_length", "key_length_mla")),
                *(f"{{arch}}.attention.{name}" for name in ("value_length_mla", "key_length_swa", "value_length_swa")),
                *(f"{{arch}}.attention.{name}" for name in ("sliding_window_pattern", "temperature_scale")),
                *(f"{{arch}}.attention.indexer.{name}" for name in ("head_count", "key_length", "top_k", "types")),
                *("{arch}.embedding_length_out", "{arch}.features_length", "{arch}.leading_dense_block_count"),
                *("{arch}.expert_feed_forward_length", "{arch}.expert_shared_feed_forward_length"),
                *("{arch}.expert_chunk_feed_forward_length", "{arch}.use_parallel_residual", "{arch}.expert_count"),
                *("{arch}.expert_used_count", "{arch}.expert_shared_count", "{arch}.expert_group_count"),
                *("{arch}.expert_group_used_count", "{arch}.expert_weights_norm", "{arch}.expert_gating_func"),
                *("{arch}.expert_group_scale", "{arch}.experts_per_group", "{arch}.moe_every_n_layers"),
                *("{arch}.moe_latent_size", "{arch}.nextn_predict_layers", "{arch}.n_deepstack_layers"),
                *("{arch}.decoder_start_token_id", "{arch}.decoder_block_count", "{arch}.attn_logit_softcapping"),
                *("{arch}.router_logit_softcapping", "{arch}.final_logit_softcapping", "{arch}.swin_norm"),
                *("{arch}.rescale_every_n_layers", "{arch}.time_mix_extra_dim", "{arch}.time_decay_extra_dim"),
                *("{arch}.token_shift_count", "{arch}.interleave_moe_layer_step", "{arch}.full_attention_interval"),
                *("{arch}.activation_sparsity_scale", "{arch}.altup.active_idx", "{arch}.altup.num_inputs"),
                *("{arch}.embedding_length_per_layer_input", "{arch}.swiglu_clamp_exp", "{arch}.swiglu_clamp_shexp"),
                *("{arch}.{dense}_feat_in", "{arch}.{dense}_feat_out", "{arch}.rope.dimension_count_swa"),
                *("{arch}.rope.freq_base_swa", "{arch}.rope.scaling.yarn_log_multiplier", "{arch}.kda.head_dim"),
                *("{arch}.ssm.conv_kernel", "{arch}.ssm.inner_size", "{arch}.ssm.state_size", "{arch}.wkv.head_size"),
                *("{arch}.ssm.time_step_rank", "{arch}.ssm.group_count", "{arch}.ssm.dt_b_c_rms"),
                *("{arch}.shortconv.l_cache", "{arch}.convnext.embedding_length", "{arch}.convnext.block_count"),
                *("{arch}.posnet.embedding_length", "{arch}.posnet.block_count"),
                *("tokenizer.ggml.add_sep_token", "tokenizer.ggml.remove_extra_whitespaces"),
                *("tokenizer.ggml.normalizer.lowercase", "tokenizer.ggml.normalizer.strip_accents"),
            ),
            _ZERO,
        ),
        **dict.fromkeys(("{arch}.rope.dimension_sections", "{arch}.classifier.output_labels"), ([], [0, 0, 0, 0])),
        **dict.fromkeys(("tokenizer.ggml.suppress_tokens", "tokenizer.ggml.precompiled_charsmap"), ([],)),
        "tokenizer.rwkv.world": ("",),
        "diffusion.shift_logits": _ZERO,
    },
)
OTHER_FILES = ("adapter.", "clip.", "imatrix.", "xielu.")  # keys of files that are no model, or another's


def gguf_table(keys: Iterable[str], architecture: str) -> Table:
    """For these keys, written out."""
    plain = {key: _general(key, architecture) for key in keys}
    others = dict.fromkeys((key for key in keys if key.startswith(OTHER_FILES)), ())
    return Table(
        {key: GGUF.harmless[name] for key, name in plain.items() if name in GGUF.harmless},
        {key: GGUF.only[name] for key, name in plain.items() if name in GGUF.only} | others,
    )


def _general(key: str, architecture: str) -> str:
    """As the gguf package writes it."""
    if key.startswith(f"{architecture}."):
        return re.sub(r"\.dense_\d_feat", ".{dense}_feat", "{arch}" + key[len(architecture) :])
    return re.sub(r"^(general\.(?:base_model|dataset))\.\d+\.", r"\1.{id}.", key)


# -------------------------------------------------------------------------------------------------- adapter_config.json

ADAPTER = _table(
    {
        "who made it, of what, and how it was trained": "task_type base_model_name_or_path revision inference_mode "
        "lora_dropout auto_mapping peft_version megatron_core qalora_group_size loftq_config eva_config "
        "runtime_config ensure_weight_tying",
        "how the base's matrix lies (GPT-2's Conv1D): A and B lie as ever": "fan_in_fan_out",
    }
)
ADAPTER_REFUSED = {
    "use_dora": "DoRA, which scales each row of the merged matrix",
    "lora_bias": "biases of B",
    "modules_to_save": "whole modules saved beside the adapter",
    "trainable_token_indices": "trained embeddings",
    "layer_replication": "replicated layers",
    "target_parameters": "adapters on bare parameters",
    "alora_invocation_tokens": "activated LoRA, which starts at a token",
    "use_qalora": "QA-LoRA, which pools the inputs",
    "use_bdlora": "block-diagonal matrices",
    "arrow_config": "Arrow, which routes between adapters",
    "kasa_config": "KaSA, which scales the singular values",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA, which draws its matrices",
    "corda_config": "CorDA, which changes the base model",
    "lora_ga_config": "LoRA-GA, which changes the base model",
    "megatron_config": "Megatron's layers",
    "ensure_weight_tying": "one adapter for tied weights",
}
