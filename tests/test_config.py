"""Knobs: each wrong value is refused with its field, its value and what to do."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import CacheConfig, ConfigError, SamplingParams, SchedulerConfig

WRONG: list[tuple[type, str, Any]] = [
    *[(CacheConfig, field, value) for field in ("num_blocks", "block_size") for value in (0, -1, 1.0, True, "8")],
    (CacheConfig, "layout", "shared"),
    *[
        (SchedulerConfig, field, value)
        for field in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "prefill_chunk_size",
            "max_prefill_batches_before_decode",
            "admission_scan_limit",
        )
        for value in (0, None, 2.5)
    ],
    (SchedulerConfig, "max_admission_bypasses", -1),
    *[(SamplingParams, "max_tokens", value) for value in (0, -3, 1.5, None, True)],
    *[(SamplingParams, "temperature", value) for value in (-0.1, math.nan, math.inf, "1", None)],
    *[(SamplingParams, "top_k", value) for value in (-1, 1.0)],
    *[(SamplingParams, "top_p", value) for value in (0.0, 1.1, math.nan)],
    *[(SamplingParams, "seed", value) for value in (-1, 2**63, 0.5)],
    *[(SamplingParams, "min_loops", value) for value in (0, None)],
    *[(SamplingParams, "max_loops", value) for value in (0, 1, 2.0)],  # 1 is below the default min_loops
    *[(SamplingParams, "exit_threshold", value) for value in (-0.1, 1.01, math.nan)],
    *[(SamplingParams, "stop_token_ids", value) for value in ((-1,), 5, (1.0,), "ab")],
    (SamplingParams, "ignore_eos", 1),
    (SamplingParams, "logprobs", "yes"),
]
REQUIRED: dict[type, dict[str, Any]] = {
    CacheConfig: {"num_blocks": 4},
    SchedulerConfig: {},
    SamplingParams: {"max_tokens": 4},
}


@pytest.mark.parametrize(("kind", "field", "value"), WRONG)
def test_a_wrong_value_is_refused_by_name(kind: type, field: str, value: Any) -> None:
    """Goal: whoever sets a knob wrongly learns which and how to mend it. Method: one wrong value at a time."""
    with pytest.raises(ConfigError) as caught:
        kind(**(REQUIRED[kind] | {field: value}))

    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field} = ")
    assert len(caught.value.remedy) > 10


def test_a_maximum_below_the_minimum_names_both() -> None:
    """Goal: two knobs that contradict each other are both named. Method: the message of max_loops below min_loops."""
    with pytest.raises(ConfigError, match=r"max_loops = 2: is below min_loops = 3"):
        SamplingParams(max_tokens=1, min_loops=3, max_loops=2)


@given(
    st.builds(
        SamplingParams,
        max_tokens=st.integers(1, 10**6),
        temperature=st.floats(0, 100, allow_nan=False),
        top_k=st.integers(0, 100),
        top_p=st.floats(0, 1, exclude_min=True),
        seed=st.none() | st.integers(0, 2**63 - 1),
        min_loops=st.integers(1, 2),
        max_loops=st.none() | st.integers(2, 9),
        exit_threshold=st.floats(0, 1),
        stop_token_ids=st.lists(st.integers(0, 99)).map(tuple),
        ignore_eos=st.booleans(),
    )
)
def test_sampling_params_survive_json(params: SamplingParams) -> None:
    """Goal: parameters cross a process border unchanged. Method: through JSON text and back, for any valid value."""
    assert SamplingParams(**json.loads(json.dumps(asdict(params)))) == params
