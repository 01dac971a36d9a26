"""Greedy completions of a target for procedural requests, on all CPUs, as one JSONL file.

A rerun goes on where the file ends, and the file's bytes do not depend on the number of CPUs.

  python -m demo.answers --target ./SmolLM2-135M-Instruct --output completions.jsonl
"""

import itertools
import json
import multiprocessing
import signal
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging as transformers_logging

from common import run
from common.chat import ChatTokenizer
from common.machine import usable_cpus
from demo.smollm_tasks import Request, make_requests

BATCH = 32  # twice as many are hardly faster on a CPU
SEED = 0

_target: tuple[ChatTokenizer, Any]  # tokenizer and model of a worker process


def main(argv: Sequence[str] | None = None) -> int:
    parser = run.make_parser(__doc__)
    parser.add_argument("--target", required=True, help="the target's folder")
    parser.add_argument("--output", type=Path, required=True, help="the JSONL file")
    parser.add_argument("--count", type=run.positive_int, default=800, help="completions")
    parser.add_argument("--max-new-tokens", type=run.positive_int, default=96, help="of each")
    args = parser.parse_args(argv)
    run.raise_on_signals()
    log = run.setup_logging("answers", debug=args.debug)
    requests = make_requests(args.count, seed=SEED)
    batches = make_batches(ChatTokenizer.load(args.target), requests)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    kept = keep_whole_batches(args.output, batches)
    log.info(f"requests={len(requests):,} answered_before={sum(map(len, batches[:kept])):,}")
    bar = run.Progress(log, total=len(requests), unit="completion")
    bar.start_at(sum(map(len, batches[:kept])))
    tokens = 0
    with (
        args.output.open("a") as file,
        ProcessPoolExecutor(
            usable_cpus(),
            mp_context=multiprocessing.get_context("spawn"),  # torch's threads survive no fork
            initializer=start_worker,
            initargs=(args.target,),
        ) as pool,
    ):
        try:
            limits = itertools.repeat(args.max_new_tokens)
            for rows, said in pool.map(answer_batch, batches[kept:], limits):
                file.write("".join(json.dumps(row) + "\n" for row in rows))
                file.flush()
                tokens += said
                bar.update(len(rows), tokens=run.format_count(tokens))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    bar.close()
    return 0


Numbered = tuple[int, Request]


def make_batches(chat: ChatTokenizer, requests: Sequence[Request]) -> list[list[Numbered]]:
    """Requests whose prompts have one length together, so that nothing is padded."""
    by_length: dict[int, list[Numbered]] = defaultdict(list)
    for number, request in enumerate(requests):
        by_length[len(prompt_ids(chat, request))].append((number, request))
    return [
        group[start : start + BATCH]
        for _, group in sorted(by_length.items())
        for start in range(0, len(group), BATCH)
    ]


def prompt_ids(chat: ChatTokenizer, request: Request) -> list[int]:
    messages = [{"role": "user", "content": request.question}]
    return chat.encode(chat.render(messages, tools=None, thinking=False, preserve_thinking=False))


def keep_whole_batches(output: Path, batches: Sequence[Sequence[Numbered]]) -> int:
    """Cut the file after the last batch that is whole in it; how many it holds."""
    lines = output.read_bytes().splitlines(keepends=True) if output.exists() else []
    whole = sum(line.endswith(b"\n") for line in lines)
    ends = [end for end in itertools.accumulate(map(len, batches)) if end <= whole]
    last = ends[-1] if ends else 0
    if last < len(lines):  # an untouched file is the same input to stage 1
        run.write_atomic(output, b"".join(lines[:last]))
    return len(ends)


# ---- in the worker processes


def start_worker(target: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the work
    torch.set_num_threads(1)
    load_target(target)


def load_target(target: str) -> None:
    global _target
    transformers_logging.disable_progress_bar()
    _target = ChatTokenizer.load(target), AutoModelForCausalLM.from_pretrained(target).eval()


def answer_batch(
    batch: Sequence[Numbered], max_new_tokens: int
) -> tuple[list[dict[str, Any]], int]:
    """Conversations as lines of JSON would have them, and the number of tokens generated."""
    chat, model = _target
    prompts = torch.tensor([prompt_ids(chat, request) for _, request in batch])
    ends = model.generation_config.eos_token_id
    ends = frozenset(ends if isinstance(ends, list) else [ends])
    said = continue_greedily(model, prompts, ends=ends, max_new_tokens=max_new_tokens)
    rows = []
    for (number, request), ids in zip(batch, said, strict=True):
        ended = ids[-1] in ends
        turn = {"role": "assistant", "content": chat.decode(ids[:-1] if ended else ids)}
        rows.append(
            {
                "id": f"{request.kind}-{number:04d}",
                "category": request.kind,
                "messages": [{"role": "user", "content": request.question}, turn],
                "finish_reason": "stop" if ended else "length",
            }
        )
    return rows, sum(map(len, said))


@torch.no_grad()
def continue_greedily(
    model: Any, prompts: torch.Tensor, *, ends: frozenset[int], max_new_tokens: int
) -> list[list[int]]:
    """The most likely continuations of prompts (N, T) int64, each with its end token if it ended.

    A row that has ended leaves the batch and costs nothing more, unlike in `generate`.
    """
    said: list[list[int]] = [[] for _ in prompts]
    going, ids, cache = list(range(len(prompts))), prompts, DynamicCache(config=model.config)
    for _ in range(max_new_tokens):
        logits = model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1).logits
        tokens = logits[:, -1].argmax(-1)
        for row, token in zip(going, tokens.tolist(), strict=True):
            said[row].append(token)
        left = [place for place, token in enumerate(tokens.tolist()) if token not in ends]
        if not left:
            break
        if len(left) < len(going):
            cache.batch_select_indices(torch.tensor(left))
            going = [going[place] for place in left]
        ids = tokens[left, None]
    return said


if __name__ == "__main__":
    run.exit_with(main)
