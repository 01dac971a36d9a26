"""What DFlash 2 adds to a drafter: convolutions inside a block, and a selector of drafts.

Letters: Q block slots, B slots of a block, H hidden size, G groups of channels, V vocabulary,
R rank, P predecessors, K candidates. Names and shapes of the parameters are those of z-lab's
DFlash 2 drafters, the maths that of z-lab/dflash model.py (@1012959) and vLLM's qwen3_dflash2.py.
Fresh weights change nothing: a new DFlash 2 drafts what a DFlash of the same seed does.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import embedding, pad

Sublayer = Callable[[torch.Tensor], torch.Tensor]


class PlainSublayer(nn.Module):
    """A sublayer as it is: DFlash's."""

    def forward(self, x: torch.Tensor, sublayer: Sublayer) -> torch.Tensor:
        return sublayer(x)


class ConvolvedSublayer(nn.Module):
    """A sublayer between two convolutions over the slots of a block.

    Each slot makes its own kernels, of both sides, from the sublayer's input: a base kernel per
    channel and what a projection adds for a group of `group_size` neighbouring channels. Tap t
    weighs the slot t before; what would lie before the block is 0.
    """

    def __init__(self, hidden_size: int, *, taps: int, group_size: int, block_size: int) -> None:
        super().__init__()
        self.taps, self.group_size, self.block_size = taps, group_size, block_size
        self.base_kernel = nn.Parameter(torch.empty(2, taps, hidden_size))
        rows = 2 * taps * hidden_size // group_size
        self.kernel_projection = nn.Linear(hidden_size, rows, bias=False)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Kernels that hand every slot on as it is."""
        self.base_kernel.zero_()
        self.base_kernel[:, 0] = 1.0
        self.kernel_projection.weight.zero_()

    def forward(self, x: torch.Tensor, sublayer: Sublayer) -> torch.Tensor:
        """x (1, Q, H) of whole blocks; the same shape comes back."""
        groups = x.shape[-1] // self.group_size
        added = self.kernel_projection(x).unflatten(-1, (2, self.taps, groups))
        x = self._convolve(x, self.base_kernel[0], added[:, :, 0])
        return self._convolve(sublayer(x), self.base_kernel[1], added[:, :, 1])

    def _convolve(self, x: torch.Tensor, base: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        """x (1, Q, H) under base (taps, H) + added (1, Q, taps, G)."""
        blocks = x.unflatten(1, (-1, self.block_size))  # (1, N, B, H)
        mixed = torch.zeros_like(x).unflatten(-1, (-1, self.group_size))  # (1, Q, G, channels)
        for tap in range(self.taps):
            before = pad(blocks, (0, 0, tap, 0))[:, :, : self.block_size].flatten(1, 2)
            kernel = base[tap].view(-1, self.group_size) + added[:, :, tap, :, None]
            mixed = mixed + kernel * before.unflatten(-1, (-1, self.group_size))
        return mixed.flatten(2)


class CandidateSelector(nn.Module):
    """How well a candidate follows a token, in the light of the slot's state.

    score(a, b) = <A[a] * (W h), B[b]> in float32, added to the slot's own logit of b.
    """

    def __init__(self, hidden_size: int, vocab_size: int, *, rank: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, rank))

    @torch.no_grad()
    def reset_parameters(self, *, std: float, generator: torch.Generator) -> None:
        """Scores of 0, and a gradient towards the successors' codebook."""
        for weight in (self.hidden_projection.weight, self.predecessor_codebook):
            weight.copy_(torch.randn(weight.shape, generator=generator) * std)
        self.successor_codebook.zero_()

    def forward(
        self, hidden: torch.Tensor, predecessors: torch.Tensor, candidates: torch.Tensor
    ) -> torch.Tensor:
        """Scores (..., P, K) float32 of candidates (..., K) after predecessors (..., P), token ids.

        hidden (..., H), normed states in the compute dtype. One call scores all slots, whatever is
        chosen among them later, so a sharded selector is gathered once.
        """
        projected = self.hidden_projection(hidden).float()[..., None, :]
        given = embedding(predecessors, self.predecessor_codebook).float() * projected
        return given @ embedding(candidates, self.successor_codebook).float().transpose(-1, -2)
