"""Which options count for a model that pools. Any other one that is set is refused by name: it would do nothing."""

from __future__ import annotations

from minivllm.config import EngineConfig
from minivllm.errors import ConfigError
from minivllm.pooling.task import GENERATE, choose_task

OPTIONS = (
    *("model.path", "model.tokenizer", "model.dtype", "model.device", "model.quantization", "model.dense_copy"),
    *("model.huge_pages", "quantization.activation_bits", "model.task", "model.pooling", "model.max_model_len"),
    *("model.seed", "scheduler.policy", "scheduler.max_num_seqs", "scheduler.max_num_batched_tokens"),
    *("executor.num_threads", "engine.core", "engine.replicas", "engine.router", "engine.overlap", "engine.restart"),
    *("engine.step_timeout", "engine.log_format", "debug.check", "debug.trace", "debug.recent_steps"),
)


def check_task(config: EngineConfig) -> None:
    """Raises ConfigError for a task that the model cannot do, and for options that do nothing under it."""
    task = choose_task(config).value
    if task != GENERATE:
        refuse_unread(config, task)
    elif config.model.pooling != "auto":
        raise ConfigError(f"model.pooling={config.model.pooling} needs model.task=embed")


def refuse_unread(config: EngineConfig, task: str) -> None:
    plain, given = EngineConfig().flat(), config.flat()
    unread = [field for field in given if field not in OPTIONS and given[field] != plain[field]]
    if unread:
        raise ConfigError(
            f"{', '.join(unread)}: model.task={task} has no KV cache and generates nothing, so this would do nothing. "
            f"Leave it out (options that count: {', '.join(OPTIONS)})"
        )
