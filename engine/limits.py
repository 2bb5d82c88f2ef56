"""Whether a model can do what a request asks: refused by name before anything is queued."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.config import ConfigError, SamplingParams, require_int


class ModelLimits(Protocol):
    """What a request has to respect of any family's config."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def loops(self) -> int: ...

    @property
    def max_positions(self) -> int: ...


def check_request(limits: ModelLimits, prompt_ids: Sequence[int], params: SamplingParams, has_text: bool) -> None:
    """Raise ConfigError, naming the parameter, for a prompt or parameters that the model cannot serve.

    has_text: whether there is a tokenizer, which stop texts need.
    """
    if not prompt_ids:
        raise ConfigError("prompt", prompt_ids, "give at least one token")
    for token_id in prompt_ids:
        require_int("prompt", token_id, 0, limits.vocab_size - 1)
    for token_id in params.stop_token_ids:
        require_int("stop_token_ids", token_id, 0, limits.vocab_size - 1)
    if params.stop and not has_text:
        raise ConfigError("stop", params.stop, "the checkpoint has no tokenizer.json; use stop_token_ids")
    if params.max_loops is not None and params.max_loops > limits.loops:
        raise ConfigError("max_loops", params.max_loops, f"the model has {limits.loops} loops")
    if params.exit_trace is not None:
        if params.exit_trace[0] != limits.loops:
            remedy = f"the first output always takes all {limits.loops} loops; begin the trace with that"
            raise ConfigError("exit_trace", params.exit_trace[0], remedy)
        for depth in params.exit_trace:
            require_int("exit_trace", depth, 1, limits.loops)
    total = len(prompt_ids) + params.max_tokens - 1
    if total > limits.max_positions:
        raise ConfigError(
            "max_tokens",
            params.max_tokens,
            f"with a prompt of {len(prompt_ids)} tokens exceeds the model's {limits.max_positions} positions",
        )
