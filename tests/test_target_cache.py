"""Tokens given up leave no trace in a target's cache, whatever its layers are made of."""

import numpy as np
import pytest
import torch

from common.target import Target
from common.target_cache import TargetCache
from tests.tiny_models import tiny_target

CPU = torch.device("cpu")
KINDS = ("llama", "qwen3", "qwen3_sliding", "qwen3_5")
PROMPT, BLOCK = 9, 8


def load(folder, kind, *, final=True, dtype=torch.float32):
    path = tiny_target(folder / kind, kind=kind)
    return Target.load(str(path), layers=(0, 1, 2), dtype=dtype, device=CPU, final=final)


def random_ids(generator, count):
    return torch.randint(0, 128, (count,), generator=generator)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_that_are_cut_equal_a_forward_without_a_cache(tmp_path, kind):
    """The sliding layers' 16 tokens are passed by the third block."""
    target = load(tmp_path, kind)
    generator = torch.Generator().manual_seed(0)
    text, logits, taps = [random_ids(generator, PROMPT)], [], []
    cache = TargetCache(target, with_taps=True)
    first = cache.extend(text[0], num_logits=PROMPT)
    logits.append(first.logits)
    taps.append(first.taps)
    for count in (3, BLOCK, 1, 5, 2, 1, BLOCK, 7):
        block = random_ids(generator, BLOCK)
        tried = cache.try_block(block)
        cache.keep(count)
        text.append(block[:count])
        logits.append(tried.logits[:count])
        taps.append(tried.taps[:count])
    ids = torch.cat(text)
    with torch.no_grad():
        want = target._model(input_ids=ids[None]).logits[0]
    torch.testing.assert_close(torch.cat(logits), want, atol=2e-4, rtol=1e-4)
    hidden = target.forward([ids.numpy().astype(np.int32)], dtype=torch.bfloat16).hidden
    assert torch.cat(taps).dtype == torch.bfloat16
    # an end of a bfloat16's rounding may fall otherwise where float32 differs by 1e-6
    torch.testing.assert_close(torch.cat(taps).float(), hidden.float(), atol=1e-4, rtol=0.008)


def test_a_recurrent_state_that_is_not_put_back_shows(tmp_path, monkeypatch):
    """What transformers would do if it were asked to crop: attention is cut, the state is not."""
    target = load(tmp_path, "qwen3_5")
    generator = torch.Generator().manual_seed(0)
    prompt, block, after = (random_ids(generator, size) for size in (PROMPT, BLOCK, 4))
    found = []
    for forget in (False, True):
        cache = TargetCache(target, with_taps=False)
        cache.extend(prompt, num_logits=1)
        cache.try_block(block)
        if forget:
            monkeypatch.setattr(cache, "_saved", {})
        cache.keep(2)
        found.append(cache.extend(after, num_logits=4).logits)
    assert (found[0] - found[1]).abs().max() > 0.1


def test_only_what_cannot_be_cropped_is_copied(tmp_path):
    for kind, copied in (("qwen3", []), ("qwen3_sliding", []), ("qwen3_5", [0, 1, 2])):
        cache = TargetCache(load(tmp_path, kind), with_taps=False)
        cache.extend(torch.arange(PROMPT), num_logits=1)
        cache.try_block(torch.arange(BLOCK))
        assert sorted(cache._saved) == copied, kind


def test_a_target_without_its_last_layers_cannot_decode(tmp_path):
    cache = TargetCache(load(tmp_path, "qwen3", final=False), with_taps=False)
    with pytest.raises(ValueError, match="without its last layers"):
        cache.extend(torch.arange(3), num_logits=1)
