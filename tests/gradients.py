"""A program for ranks: the gradients of one step on a fixed global batch of four packs.

    gradients DRAFT TARGET OUTPUT MICRO_BATCH [MICRO_BATCH ...]

DRAFT is the kind of drafter. For each loss and size of micro-batch rank 0 saves
OUTPUT-LOSS-SIZE.safetensors: {"loss": ..., name: gradient}, the full gradients before clipping.
"""

import itertools
import sys
from collections.abc import Sequence

import numpy as np
import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

import train_dflash_online as trainer
from common import dist, setup
from common.batches import PackedRows
from common.drafting import TargetEnds, accumulate_gradients, micro_batches
from common.feed import ReadyStep, ask
from common.losses import LOSSES
from common.target import Target
from common.wire import ColocatedHiddenStates

LAYERS = (0, 1, 2)
# documents of each pack, very unequal in what they supervise; the last pack is empty
LENGTHS = ((40, 60, 20), (100,), (9, 5), ())


def make_pack(lengths: tuple[int, ...], generator: np.random.Generator) -> PackedRows:
    size = 128
    ids, mask = np.zeros(size, np.int64), np.zeros(size, bool)
    documents, positions = np.full(size, -1, np.int32), np.zeros(size, np.int64)
    lists, start = [], 0
    for number, length in enumerate(lengths):
        tokens = generator.integers(0, 128, length).astype(np.int32)
        place = slice(start, start + length)
        ids[place], documents[place], positions[place] = tokens, number, np.arange(length)
        mask[place] = generator.random(length) < 0.7
        lists.append(tokens)
        start += length
    return PackedRows(ids, mask, documents, positions, tuple(lists))


def main(argv: Sequence[str] | None = None) -> int:
    draft, target_folder, output, *sizes = sys.argv[1:] if argv is None else argv
    torch.set_num_threads(1)
    with dist.start("cpu") as world:
        target = Target.load(
            target_folder, layers=LAYERS, dtype=torch.float32, device=torch.device("cpu"),
            final=True,
        )  # fmt: skip
        hidden_states = ColocatedHiddenStates(target, max_tokens_per_request=1000)
        flags = ["--data", "x", "--target", target_folder, "--output", "x", "--draft-layers", "2"]
        flags += ["--draft", draft, "--block-size", "8", "--sliding-window", "16"]
        flags += ["--pack-length", "128"]
        args = trainer.parse_args(flags)
        args.layers = LAYERS
        config = setup.drafter_config(args, None, mask_token_id=100)
        ends = TargetEnds(target.embedding, target.head)
        drafter, _ = setup.build_drafter(config, args, world)
        generator = np.random.default_rng(0)
        packs = [make_pack(lengths, generator) for lengths in LENGTHS]
        share = len(packs) // world.size
        mine = packs[share * world.rank : share * (world.rank + 1)]
        taps = [ask(hidden_states, pack, final=True) for pack in mine]
        ready = ReadyStep(None, share * world.rank, tuple(mine), tuple(taps))
        for kind, size in itertools.product(LOSSES, map(int, sizes)):
            drafter.zero_grad()
            batches = micro_batches(
                ready, config, step=1, seed=0, size=size, num_anchors=16, gamma=4.0,
                device=world.device,
            )  # fmt: skip
            sums = accumulate_gradients(
                drafter, config, ends, batches, loss_kind=kind, attention="sdpa", world=world
            )
            found = {"loss": torch.tensor(sums.loss)}
            for name, parameter in drafter.named_parameters():
                gradient = parameter.grad
                full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
                found[name] = full.contiguous()
            if world.is_main:
                save_file(found, f"{output}-{kind}-{size}.safetensors")
    return 0
