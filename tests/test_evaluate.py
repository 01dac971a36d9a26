"""An evaluation against blocks drafted one by one; its controls and what they say."""

import dataclasses
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from common import dist
from common.acceptance import acceptance_lengths, judge_drafts
from common.batches import PackedRows
from common.blocks import decay_weights, legal_anchors, make_blocks
from common.chat import ChatTokenizer
from common.drafter import Drafter
from common.drafting import TargetEnds, draft_blocks, padded_taps, tensor_pack
from common.evaluate import evaluate
from common.target import Taps
from common.target_files import count_parameters, think_tokens
from common.verdict import Control, Drafts, Evaluation
from common.wire import Description
from demo import tokenizer as demo_tokenizer
from tests.gradients import make_pack
from tests.tiny_models import tiny_drafter_config, tiny_target

WORDS, HIDDEN, SIZE = 4, 32, 6  # of so few words a random drafter guesses some
CONFIG = tiny_drafter_config(
    hidden_size=HIDDEN, intermediate_size=48, max_position_embeddings=256, vocab_size=WORDS,
    block_size=SIZE, mask_token_id=WORDS - 1, target_layer_ids=(0, 1),
    layer_types=("sliding_attention", "full_attention", "full_attention"), sliding_window=16,
)  # fmt: skip


class TableStates:
    """Hidden states that depend on a token and its place alone, however documents are packed."""

    def __init__(self, *, final: bool) -> None:
        generator = torch.Generator().manual_seed(5)
        self._tables = torch.randn(2, 3 * HIDDEN, generator=generator)
        self.description = Description(1, "t", "w", "e", (0, 1), HIDDEN, WORDS, "", 1, 1, final)
        self.asked = 0

    def submit(self, documents, *, final=False):
        self.asked += 1
        tokens = torch.cat([torch.from_numpy(d.astype(np.int64)) for d in documents])
        places = torch.cat([torch.arange(len(d)) for d in documents])
        angles = tokens[:, None] * self._tables[0] + places[:, None] * self._tables[1]
        states = (2 * angles.sin()).to(torch.bfloat16)
        answer = Future()
        answer.set_result(Taps(states[:, : 2 * HIDDEN], states[:, 2 * HIDDEN :] if final else None))
        return answer


def make_packs(lengths=((40, 60, 20), (100,), (9, 30))) -> list[PackedRows]:
    packs = [make_pack(each, np.random.default_rng(2)) for each in lengths]
    for pack in packs:
        pack.input_ids[:] %= WORDS - 1
    return [
        dataclasses.replace(pack, token_lists=tuple(t % (WORDS - 1) for t in pack.token_lists))
        for pack in packs
    ]


@pytest.fixture(scope="module")
def world():
    with dist.start("cpu") as world:
        yield world


@pytest.fixture(scope="module")
def ends():
    table = torch.randn(2, WORDS, HIDDEN, generator=torch.Generator().manual_seed(1))
    return TargetEnds(table[0], table[1])


def make_drafter(*, ignores_context: bool = False) -> Drafter:
    drafter = Drafter(CONFIG)
    drafter.reset_parameters(seed=3)
    with torch.no_grad():
        for name, weight in drafter.named_parameters():
            if weight.dim() == 2:
                weight.mul_(0.0 if ignores_context and name == "fc.weight" else 8.0)
    return drafter.eval()


def run(drafter, ends, world, *, packs=None, final=True, states=None, **changes) -> Evaluation:
    options = dict(
        num_anchors=16, gamma=4.0, temperature=1.0, sample_controls=False, seed=0,
        attention="sdpa", world=world,
    )  # fmt: skip
    return evaluate(
        drafter, CONFIG, ends, states or TableStates(final=final),
        packs=packs or make_packs(), **{**options, **changes},
    )  # fmt: skip


@torch.no_grad()
def one_by_one(drafter, ends):
    """Every anchor of every document drafted alone: (row, position, length, loss, weight)."""
    states, found, row = TableStates(final=True), [], 0
    for whole in make_packs():
        masks = np.split(whole.loss_mask, np.cumsum([len(d) for d in whole.token_lists]))
        for document, mask in zip(whole.token_lists, masks, strict=False):
            length = len(document)
            alone = PackedRows(
                document.astype(np.int64), mask, np.zeros(length, np.int32),
                np.arange(length), (document,),
            )  # fmt: skip
            pack = tensor_pack([alone], device=torch.device("cpu"))
            taps = padded_taps([alone], [states.submit([document]).result().hidden], ends.head)
            for anchor in torch.nonzero(legal_anchors(pack))[:, 0]:
                blocks = make_blocks(
                    pack, anchor[None], torch.ones(1, dtype=torch.bool), block_size=SIZE,
                    mask_token_id=WORDS - 1,
                )  # fmt: skip
                output = draft_blocks(
                    drafter, CONFIG, ends, pack=pack, blocks=blocks, taps=taps, attention="sdpa"
                )
                judged = judge_drafts(output, ends.head, blocks, chunk_slots=100)
                weights = decay_weights(blocks, gamma=4.0)[1:]
                loss = float((weights * judged.cross_entropy[0]).sum())
                accepted = int(acceptance_lengths(judged.right))
                found.append((row, int(anchor), accepted, loss, float(weights.sum())))
            row += 1
    return found


def test_an_evaluation_is_what_blocks_drafted_one_by_one_give(ends, world):
    drafter = make_drafter()
    result, alone = run(drafter, ends, world), one_by_one(drafter, ends)
    rows, positions, lengths, losses, weights = map(list, zip(*alone, strict=True))
    assert result.drafts.rows.tolist() == rows
    assert result.drafts.positions.tolist() == positions
    assert result.drafts.lengths.tolist() == lengths and len(set(lengths)) >= 3
    assert result.acceptance_length == pytest.approx(sum(lengths) / len(lengths))
    assert result.loss == pytest.approx(sum(losses) / sum(weights), rel=1e-5)
    tokens = steps = 0
    for row in range(6):
        mine = {p: n for r, p, n in zip(rows, positions, lengths, strict=True) if r == row}
        place = min(mine)
        while place in mine:
            tokens, steps, place = tokens + mine[place], steps + 1, place + mine[place]
    assert result.walked_acceptance_length == pytest.approx(tokens / steps)
    assert 1 < result.expected_acceptance_length < SIZE


def test_the_size_of_a_pass_changes_nothing(ends, world):
    drafter = make_drafter()
    want, got = run(drafter, ends, world), run(drafter, ends, world, num_anchors=7)
    assert torch.equal(want.drafts.lengths, got.drafts.lengths)
    torch.testing.assert_close(want.drafts.expected, got.drafts.expected, atol=1e-5, rtol=1e-5)
    assert [c.control for c in want.controls] == [c.control for c in got.controls]


def test_controls_do_without_the_hidden_states(ends, world):
    states = TableStates(final=False)
    blind = run(make_drafter(ignores_context=True), ends, world, states=states)
    assert states.asked == 3, "a pack's hidden states are asked for once, for all its passes"
    assert [control.name for control in blind.controls] == ["zeroed", "shifted"]
    for control in blind.controls:
        assert control.control == control.real == blind.acceptance_length > 1.01
        assert control.share == 1
    seeing = run(make_drafter(), ends, world)
    assert all(control.control != control.real for control in seeing.controls)


def test_sampled_controls_use_some_anchors_and_the_same_ones_each_time(ends, world):
    drafter = make_drafter()
    whole = run(drafter, ends, world)
    sampled = [run(drafter, ends, world, sample_controls=True) for _ in range(2)]
    assert sampled[0].controls == sampled[1].controls
    assert 32 < sampled[0].controls[0].anchors < whole.controls[0].anchors
    assert torch.equal(sampled[0].drafts.lengths, whole.drafts.lengths)
    other = run(drafter, ends, world, sample_controls=True, seed=1)
    assert other.controls != sampled[0].controls


def test_without_final_states_nothing_is_expected(ends, world):
    with_final, without = (run(make_drafter(), ends, world, final=final) for final in (True, False))
    assert without.expected_acceptance_length is without.slot_overlap is None
    assert torch.equal(without.drafts.lengths, with_final.drafts.lengths)
    assert without.loss == with_final.loss


def make_result(real: float, zeroed: float, shifted: float) -> Evaluation:
    nothing = torch.zeros(0, dtype=torch.int64)
    return Evaluation(
        1.0, real, real, None, (), (), None,
        (Control("zeroed", 9, real, zeroed), Control("shifted", 9, real, shifted)),
        Drafts(nothing, nothing, nothing, None),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("figures", "context", "words"),
    [
        ((3.0, 1.1, 1.2), "used", "zeroed 5%, shifted 10%"),
        ((3.0, 2.6, 1.2), "ignored", "with zeroed hidden states it still reaches 80%"),
        ((3.0, 1.1, 2.9), "ignored", "shifted hidden states it still reaches 95%"),
        ((3.0, 2.57, 1.2), "used", "zeroed 78%"),
        ((1.2, 1.2, 1.0), "ignored", "100%"),
        ((1.19, 1.19, 1.19), "unknown", "too few drafts"),
        ((1.0, 1.0, 1.0), "unknown", "too few drafts"),
    ],
)
def test_a_drafter_that_does_as_well_without_its_context_is_found_out(figures, context, words):
    result = make_result(*figures)
    assert result.context == context and words in result.verdict


def test_walks_of_cut_blocks_take_shorter_steps():
    drafts = Drafts(
        rows=torch.tensor([0, 0, 0, 0, 1, 1]),
        positions=torch.tensor([3, 4, 5, 6, 1, 2]),
        lengths=torch.tensor([4, 3, 2, 1, 2, 1]),
        expected=None,
    )
    assert drafts.walk(block_size=4) == [(4, 1), (2, 1)]
    assert drafts.walk(block_size=2) == [(4, 2), (2, 1)]
    assert drafts.walk(block_size=1) == [(4, 4), (2, 2)]


def test_what_a_target_says_of_its_thinking_and_its_size(tmp_path):
    tiny_target(tmp_path, kind="qwen3")
    assert think_tokens(str(tmp_path)) is None
    demo_tokenizer.build(tmp_path)
    chat = ChatTokenizer.load(str(tmp_path))
    assert think_tokens(str(tmp_path)) == (chat.token_id("<think>"), chat.token_id("</think>"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    ends = {"model.embed_tokens.weight", "lm_head.weight"}
    want = sum(p.numel() for name, p in model.named_parameters() if name not in ends)
    assert count_parameters(str(tmp_path)) == want
    (tmp_path / "model.safetensors").unlink()
    assert count_parameters(str(tmp_path)) is None
