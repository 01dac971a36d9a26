"""The trainer with fixed anchors instead of drawn ones, for a row of bench_losses.

Blocks tile each completion from its first token on, the same ones at every visit: the ablation of
DFlash's Table 9.
"""

import torch

import train_dflash_online
from common import drafting, run

BLOCK_SIZE = 8  # the demo's


def tiled_anchors(
    legal: torch.Tensor, num_anchors: int, *, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """In the place of common.blocks.sample_anchors: every BLOCK_SIZE-th place of each legal run."""
    places = torch.arange(len(legal))
    begins = legal & ~torch.cat([torch.zeros(1, dtype=torch.bool), legal[:-1]])
    since = places - torch.where(begins, places, 0).cummax(0).values
    chosen = torch.nonzero(legal & (since % BLOCK_SIZE == 0))[:num_anchors, 0]
    anchors = torch.zeros(num_anchors, dtype=torch.int64)
    anchors[: len(chosen)] = chosen
    return anchors, torch.arange(num_anchors) < len(chosen)


if __name__ == "__main__":
    drafting.sample_anchors = tiled_anchors
    run.exit_with(train_dflash_online.main)
