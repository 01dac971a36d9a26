"""Two training steps of a drafter on a CPU, and by how much they raise a process's memory."""

import argparse
import ctypes
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common import dist
from common.batches import PackedRows
from common.drafter_config import DrafterConfig
from common.drafting import TargetEnds, accumulate_gradients, micro_batches
from common.feed import ReadyStep
from common.setup import build_drafter
from common.target import Taps
from tests.bench.bench_step import status_bytes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
TOKENS, ANCHORS, HIDDEN, WIDE, WORDS = 128, 48, 512, 1536, 4096


def shape(draft: str, hidden_size: int = HIDDEN, intermediate_size: int = WIDE) -> DrafterConfig:
    return DrafterConfig.for_target(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        vocab_size=WORDS,
        num_target_layers=8,
        rms_norm_eps=1e-6,
        rope_theta=1e7,
        max_position_embeddings=4096,
        eos_token_id=0,
        target_layer_ids=(1, 2, 3),
        num_layers=2,
        block_size=16,
        mask_token_id=9,
        sliding_window=2048,
        draft=draft,
    )


def ready_step(config: DrafterConfig, forwards: int, tokens: int) -> ReadyStep:
    """Packs of one document each, all of it supervised."""
    packs, taps = [], []
    for _ in range(forwards):
        ids = np.arange(tokens) % WORDS
        none, places = np.zeros(tokens, np.int32), np.arange(tokens)
        lists = (ids.astype(np.int32),)
        packs.append(PackedRows(ids, np.ones(tokens, bool), none, places, lists))
        answer: Future[Taps] = Future()
        width = len(config.target_layer_ids) * config.hidden_size
        answer.set_result(Taps(torch.randn(tokens, width).bfloat16(), None))
        taps.append(answer)
    return ReadyStep(None, 0, tuple(packs), tuple(taps))  # type: ignore[arg-type]


def two_steps(
    world: Any, config: DrafterConfig, *, forwards: int, anchors: int, checkpoint_layers: bool
) -> None:
    args = argparse.Namespace(
        seed=0, init_from=None, compile=False, dtype="float32", learning_rate=1e-4,
        checkpoint_layers=checkpoint_layers,
    )  # fmt: skip
    drafter, optimizer = build_drafter(config, args, world)
    ends = TargetEnds(*(torch.randn(WORDS, config.hidden_size) * 0.02 for _ in range(2)))
    ready = ready_step(config, forwards, TOKENS)
    for step in range(2):
        batches = micro_batches(
            ready, config, step=step, seed=0, size=1, num_anchors=anchors, gamma=7.0,
            device=world.device,
        )  # fmt: skip
        accumulate_gradients(
            drafter, config, ends, batches, loss_kind="ce", attention="sdpa", world=world
        )
        optimizer.step()
        optimizer.zero_grad()


def growth(draft: str, forwards: int, checkpoint_layers: bool) -> int:
    """Bytes that the peak rises over what is there before drafter, embedding and head are made.

    For a process of its own. A tiny step comes first, so that no code is loaded in between.
    """
    torch.set_num_threads(1)
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 17)  # what is freed goes back at once, as on a GPU
    libc.mallopt(M_TRIM_THRESHOLD, 0)
    with dist.start("cpu") as world:
        two_steps(world, shape(draft, 128, 128), forwards=2, anchors=2, checkpoint_layers=True)
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): the peak starts from here
        before = status_bytes("VmRSS")
        two_steps(
            world,
            shape(draft),
            forwards=forwards,
            anchors=ANCHORS,
            checkpoint_layers=checkpoint_layers,
        )
        return status_bytes("VmHWM") - before
