"""Attention of block slots over [context ; blocks], under any of the three forms of one mask.

A GPU takes flex_attention's BlockMask, compiled. A CPU has no backward of flex, and a dense mask
makes it compute all pairs, most of which nobody sees; it takes the mask in groups of blocks
instead. A dense mask or none serves where neither matters.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention


class MaskGroup(NamedTuple):
    """Neighbouring blocks: the queries, the context that some of them see, and who sees what.

    `queries` are places among the Q block slots, `context` among the S context keys; mask
    (1, 1, q, c + q) bool, over the context and the group's own slots.
    """

    queries: slice
    context: slice
    mask: torch.Tensor


@dataclass(frozen=True)
class GroupedMask:
    """A mask over (Q, S+Q) without the keys that no query of a group sees; `context_length` is S.

    Its shapes depend on the data, so a compiled layer would be compiled anew for each.
    """

    context_length: int
    groups: tuple[MaskGroup, ...]


AttentionMask = torch.Tensor | BlockMask | GroupedMask | None


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: AttentionMask
) -> torch.Tensor:
    """Grouped-head attention: queries (1, heads, Q, D), keys and values (1, kv heads, S+Q, D)."""
    if isinstance(mask, BlockMask):
        outside = queries.is_cuda and not torch.compiler.is_compiling()
        flex = _compiled_flex_attention() if outside else flex_attention
        return flex(queries, keys, values, block_mask=mask, enable_gqa=True)
    if isinstance(mask, GroupedMask):
        return _attend_in_groups(queries, keys, values, mask)
    return functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, enable_gqa=True
    )


@functools.cache
def _compiled_flex_attention() -> Any:
    # On first use: inductor takes a second to import. Shapes are fixed, so a kernel of its own for
    # each is right; automatic dynamic shapes would add one compile and a slower kernel.
    return torch.compile(flex_attention, dynamic=False)


def _attend_in_groups(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: GroupedMask
) -> torch.Tensor:
    context_keys, block_keys = _split(keys, mask.context_length)
    context_values, block_values = _split(values, mask.context_length)
    outputs = [
        functional.scaled_dot_product_attention(
            queries[:, :, group.queries],
            torch.cat([context_keys[:, :, group.context], block_keys[:, :, group.queries]], dim=2),
            torch.cat(
                [context_values[:, :, group.context], block_values[:, :, group.queries]], dim=2
            ),
            attn_mask=group.mask,
            enable_gqa=True,
        )
        for group in mask.groups
    ]
    return torch.cat(outputs, dim=2)


def _split(x: torch.Tensor, context_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return x[:, :, :context_length], x[:, :, context_length:]


def num_compiled_graphs() -> int:
    """Graphs that torch.compile has made in this process so far.

    It stands still once every kind of forward has run (training; evaluation, which has no
    gradients): a step after that which raises it has met a new shape, and waited for a compiler.
    """
    from torch._dynamo.utils import counters  # a second and a half to import, only if compiling

    return counters["stats"]["unique_graphs"]
