"""What only a CUDA device can show. Skips by itself where there is none; never run so far (see the walkthrough)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pd_tools import PATIENCE_S
from reference_ouro import write_checkpoint

from engine.config import CacheConfig, SamplingParams
from engine.local import LLMEngine
from engine.pd.config import PDConfig
from engine.pd.engine import PDEngine

DEVICES = torch.cuda.device_count()
PROMPTS = [[5 + (i * 7 + j) % 50 for j in range(10 + 9 * i)] for i in range(6)]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, min_loops=1, exit_threshold=0.6)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICES < 1, reason="needs one CUDA device; torch sees none")
def test_one_process_on_cuda_gives_the_tokens_of_the_cpu(tmp_path: Path) -> None:
    """Goal: one code base. Method: the same requests in float32 on both devices."""
    folder = write_checkpoint(tmp_path, seed=1)
    wanted = LLMEngine(folder, CacheConfig(512)).generate(PROMPTS, PARAMS)

    found = LLMEngine(folder, CacheConfig(512), device="cuda:0").generate(PROMPTS, PARAMS)

    assert [o.token_ids for o in found] == [o.token_ids for o in wanted]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICES < 2, reason=f"needs two CUDA devices; torch sees {DEVICES}")
def test_the_pair_on_two_devices_gives_the_tokens_of_one(tmp_path: Path) -> None:
    """Goal: events, VRAM registration and transfer on CUDA. Method: the same requests in one process on CUDA."""
    folder = write_checkpoint(tmp_path, seed=1)
    wanted = LLMEngine(folder, CacheConfig(512), device="cuda:0").generate(PROMPTS, PARAMS)

    with PDEngine(folder, PDConfig(prefill_device="cuda:0", decode_device="cuda:1")) as engine:
        found = engine.generate(PROMPTS, PARAMS)
        assert engine.drain(PATIENCE_S)
        assert engine.obligations() == []

    assert [o.token_ids for o in found] == [o.token_ids for o in wanted]
