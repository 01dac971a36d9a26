"""The parts of `make demo-smollm` that need no weights: its requests, and greedy answers kept."""

import json

import torch
from transformers import AutoModelForCausalLM

import tokenize_completions
import train_dflash_online
from common.chat import ChatTokenizer
from demo import answers, smollm
from demo.smollm_tasks import FORMS, make_requests
from tests.tiny_models import tiny_target
from tests.tiny_tokenizer import build_tiny_tokenizer

VOCAB = 1024


def test_requests_are_the_same_every_time_and_none_comes_twice():
    requests = make_requests(800, seed=0)
    assert requests == make_requests(800, seed=0) != make_requests(800, seed=1)
    assert len({request.question for request in requests}) == 800
    assert {request.kind for request in requests} == set(FORMS)


def test_the_flags_are_those_that_the_scripts_have():
    """The demo itself runs by hand only."""
    folders = ["--data", "a", "--target", "b", "--output", "c"]
    train_dflash_online.parse_args([*folders, *smollm.TRAIN_FLAGS.split()])
    folders = ["--input", "a", "--output", "c", "--tokenizer", "b"]
    args = tokenize_completions.parse_args([*folders, *smollm.TOKENIZE_FLAGS.split()])
    assert args.mask_token == "<empty_output>" and not args.thinking


def test_rows_that_end_leave_the_batch_and_change_no_other(tmp_path):
    torch.set_num_threads(1)
    folder = tiny_target(tmp_path, kind="qwen3", vocab_size=64)
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompts = torch.randint(1, 64, (12, 5), generator=torch.Generator().manual_seed(0))
    free = answers.continue_greedily(model, prompts, ends=frozenset(), max_new_tokens=8)
    ends = frozenset({free[0][1], free[3][4]})
    said = answers.continue_greedily(model, prompts, ends=ends, max_new_tokens=8)
    for whole, ids in zip(free, said, strict=True):
        end = next((place for place, token in enumerate(whole) if token in ends), 7)
        assert ids == whole[: end + 1]
    assert len({len(ids) for ids in said}) > 1
    model.generation_config.eos_token_id = None
    plain = model.generate(prompts, max_new_tokens=8, do_sample=False)[:, 5:]
    assert free == plain.tolist()


def test_a_file_that_was_cut_goes_on_and_a_whole_one_is_not_touched(tmp_path):
    target = tiny_target(build_tiny_tokenizer(tmp_path / "target"), kind="qwen3", vocab_size=VOCAB)
    batches = answers.make_batches(ChatTokenizer.load(str(target)), make_requests(12, seed=0))
    assert len(batches) > 2 and sum(map(len, batches)) == 12
    answers.load_target(str(target))
    output = tmp_path / "completions.jsonl"

    def write(kept):
        with output.open("a") as file:
            for batch in batches[kept:]:
                rows, _ = answers.answer_batch(batch, 4)
                file.write("".join(json.dumps(row) + "\n" for row in rows))

    write(answers.keep_whole_batches(output, batches))
    whole = output.read_bytes()
    assert {json.loads(line)["finish_reason"] for line in whole.splitlines()} == {"length"}
    for cut in (len(whole) * 2 // 3, len(whole) - 1, 3):
        output.write_bytes(whole[:cut])
        kept = answers.keep_whole_batches(output, batches)
        assert kept < len(batches) and whole.startswith(output.read_bytes())
        write(kept)
        assert output.read_bytes() == whole
    before = output.stat().st_ino, output.stat().st_mtime_ns
    assert answers.keep_whole_batches(output, batches) == len(batches)
    assert (output.stat().st_ino, output.stat().st_mtime_ns) == before
