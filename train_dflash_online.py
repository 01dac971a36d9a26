"""Stage 3: train a DFlash drafter on the frozen target's hidden states.

Reads   the shards of stage 1 as they appear (--data, s3:// or a folder), hidden states from stage 2
        (--hidden-states HOST:PORT) or from a target loaded beside the drafter (colocated), and the
        target's own embedding and head (--target).
Writes  run.json, metrics.jsonl, tensorboard/, curves.png, checkpoints/ and export/ under --output;
        export/ is what vLLM, SGLang and z-lab's class load.
Resume  run the same command again: it goes on from the newest whole checkpoint, or on a new machine
        from the newest copy under --checkpoint-uri.

  python train_dflash_online.py --data s3://bucket/tokens/ --target Qwen3.6-27B --output runs/a \\
      --hidden-states 127.0.0.1:8815
  torchrun --nproc-per-node 4 --signals-to-handle SIGTERM,SIGINT train_dflash_online.py \\
      --data s3://bucket/tokens/ --target Qwen3.6-27B --output runs/a --hidden-states colocated

Exit codes: 0 done, 1 failed, 2 usage; a single process ends with 143 after SIGTERM and 130 after
Ctrl-C, with the step finished and saved (torchrun itself returns 1 then).
"""

import argparse
import contextlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from common import checkpoint, dist, run
from common.batches import (
    PACK_MULTIPLE,
    Cursor,
    StepStream,
    held_out_packs,
)
from common.client import ServedHiddenStates
from common.drafter import Drafter, DrafterConfig
from common.drafting import TargetEnds, accumulate_gradients, micro_batches
from common.evaluate import evaluate
from common.feed import ReadyStep, StepFeed
from common.journal import Journal, read_metrics
from common.lifetime import Stopped, StopRequest, Waiting, make_folder, run_folder_lock
from common.mirror import Mirror
from common.plan import Plan
from common.s3 import abort_left_uploads
from common.schedule import learning_rate, training_horizon
from common.shards import Shard, TokenizedDataset
from common.store import add_store_arguments, add_store_write_arguments, open_store
from common.stored import StoredHiddenStates
from common.target import (
    Target,
    default_target_layers,
    read_embedding_and_head,
    target_facts,
)
from common.wire import ColocatedHiddenStates, HiddenStates, read_secret

ADAM_BETAS = (0.9, 0.95)
MAX_GRAD_NORM = 1.0
SHARD_POLL_S = 1.0
ADDRESS = r"(grpc(\+tls|\+tcp)?://)?[^/,]+:\d+"

# Flags that say where and how fast, not what is trained: a resumed run may change them freely.
FREE_FLAGS = frozenset(
    [
        "allow_change",
        "attention",
        "cache_dir",
        "checkpoint_uri",
        "data",
        "debug",
        "endpoint_url",
        "eval_every",
        "hidden_states",
        "keep",
        "keep_every",
        "log_every",
        "micro_batch",
        "output",
        "prefetch",
        "resume",
        "save_every",
        "server_timeout",
        "shard_timeout",
        "sse",
        "sse_kms_key",
        "target",
        "tls_root_certs",
        "token_file",
    ]
)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = run.make_parser(__doc__)
    group = parser.add_argument_group("data")
    group.add_argument("--data", required=True, help="stage 1's output: s3://... or a folder")
    add_store_arguments(group)
    group.add_argument("--cache-dir", type=Path, help="local copies of shards [OUTPUT/cache]")
    group.add_argument(
        "--shard-timeout", type=run.positive_float, default=1800.0, help="seconds to wait for one"
    )
    group = parser.add_argument_group("target")
    group.add_argument("--target", required=True, help="folder or hub id of the target")
    group.add_argument(
        "--hidden-states",
        default="colocated",
        help="colocated; HOST:PORT[,HOST:PORT] of servers; s3://... or a folder of written ones",
    )
    group.add_argument("--layers", type=run.int_list, help="tapped layers [five, evenly spread]")
    group.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="auto: float32 on CPU, bfloat16 on CUDA",
    )
    group.add_argument("--prefetch", type=run.positive_int, default=4, help="steps asked ahead")
    group.add_argument(
        "--server-timeout", type=run.positive_float, default=300.0, help="seconds to wait for one"
    )
    group.add_argument("--token-file", type=Path, help="the servers' shared secret")
    group.add_argument("--tls-root-certs", type=Path, help="PEM file to trust servers by")
    group = parser.add_argument_group("drafter")
    group.add_argument(
        "--draft-config", type=Path, help="config.json to take the shape from instead"
    )
    group.add_argument(
        "--draft-layers", type=run.positive_int, default=5, help="depth of the drafter"
    )
    group.add_argument(
        "--block-size", type=run.positive_int, default=16, help="the anchor and the drafts"
    )
    group.add_argument(
        "--sliding-window", type=run.non_negative_int, default=2048, help="0: all layers full"
    )
    group = parser.add_argument_group("training")
    group.add_argument("--pack-length", type=run.positive_int, default=4096, help="tokens a pack")
    group.add_argument("--global-batch", type=run.positive_int, default=8, help="packs a step")
    group.add_argument("--micro-batch", type=run.positive_int, default=1, help="packs a forward")
    group.add_argument(
        "--anchor-ratio", type=run.fraction, default=0.125, help="anchors per token of a pack"
    )
    group.add_argument("--gamma", type=run.positive_float, default=7.0, help="slot weight decay")
    group.add_argument("--learning-rate", type=run.positive_float, default=6e-4, help="peak")
    group.add_argument("--warmup-ratio", type=run.fraction, default=0.04, help="of all steps")
    group.add_argument("--epochs", type=run.positive_int, default=6, help="passes over the data")
    group.add_argument("--max-steps", type=run.positive_int, help="end here, and the cosine too")
    group.add_argument(
        "--seed", type=run.non_negative_int, default=0, help="of order, anchors, weights"
    )
    group.add_argument(
        "--attention",
        choices=("auto", "flex", "sdpa"),
        default="auto",
        help="auto: sdpa on CPU, flex on CUDA",
    )
    group.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: CUDA where there is one",
    )
    group = parser.add_argument_group("evaluation")
    group.add_argument("--eval-fraction", type=run.fraction, default=0.005, help="of rows held out")
    group.add_argument("--eval-rows", type=run.non_negative_int, default=256, help="0: never")
    group.add_argument("--eval-every", type=run.positive_int, default=1000, help="steps")
    group = parser.add_argument_group("output")
    group.add_argument("--output", type=str, required=True, help="run folder, local")
    group.add_argument("--save-every", type=run.positive_int, default=1000, help="steps")
    group.add_argument("--keep", type=run.positive_int, default=3, help="newest checkpoints kept")
    group.add_argument(
        "--keep-every", type=run.positive_int, help="keep those at multiples of it too, in steps"
    )
    group.add_argument(
        "--checkpoint-uri", help="s3://... or a folder that checkpoints are copied to [nowhere]"
    )
    add_store_write_arguments(group)
    group.add_argument("--log-every", type=run.positive_int, default=10, help="steps")
    group.add_argument("--resume", default="auto", help="auto, never, or a checkpoint folder")
    group.add_argument(
        "--allow-change", default="", help="settings a resume may change, comma-separated"
    )
    args = parser.parse_args(argv)
    try:
        return resolve(args)
    except run.UsageError as error:
        parser.error(str(error))


def resolve(args: argparse.Namespace) -> argparse.Namespace:
    """Check the flags against each other and settle the ones that say auto."""
    if "://" in args.output:
        raise run.UsageError(
            f"--output {args.output}: must be a local folder; --checkpoint-uri copies its "
            "checkpoints there"
        )
    if args.sse and not (args.checkpoint_uri or "").startswith("s3://"):
        raise run.UsageError(f"--sse {args.sse}: only with --checkpoint-uri s3://...")
    args.output = Path(args.output)
    args.cache_dir = args.cache_dir or args.output / "cache"
    if args.pack_length % PACK_MULTIPLE:
        raise run.UsageError(
            f"--pack-length {args.pack_length}: must be a multiple of {PACK_MULTIPLE}"
        )
    if args.block_size < 2:
        raise run.UsageError("--block-size 1: must be at least 2, the anchor and one draft")
    if int(args.anchor_ratio * args.pack_length) < 1:
        raise run.UsageError(f"--anchor-ratio {args.anchor_ratio}: gives no anchor in a pack")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    elif args.device == "cuda" and not torch.cuda.is_available():
        raise run.UsageError("--device cuda: torch sees no CUDA device here")
    if args.dtype == "auto":
        args.dtype = "bfloat16" if args.device == "cuda" else "float32"
    if args.attention == "auto":
        args.attention = "flex" if args.device == "cuda" else "sdpa"
    elif args.attention == "flex" and args.device == "cpu":
        raise run.UsageError(
            "--attention flex: torch has no backward of it on a CPU; use sdpa (same mask)"
        )
    return args


# ---- what the run stands on


@dataclass(frozen=True)
class Setup:
    """Everything that stays the same over the run."""

    args: argparse.Namespace
    world: dist.World
    dataset: TokenizedDataset
    hidden_states: HiddenStates
    ends: TargetEnds
    config: DrafterConfig
    num_anchors: int
    settings: dict[str, Any]
    checkpoints: checkpoint.Checkpoints


def open_dataset(args: argparse.Namespace, log: Any, stop: StopRequest) -> TokenizedDataset:
    """Wait for the plan and shard 0; refuse rows that no pack can hold."""
    dataset = TokenizedDataset(args.data, cache_dir=args.cache_dir, endpoint_url=args.endpoint_url)
    waiting = Waiting(log, stop)
    plan = dataset.wait_for_plan(
        timeout_s=args.shard_timeout, poll_s=SHARD_POLL_S, on_wait=waiting.for_("plan.json")
    )
    longest = plan.settings["max_length"]
    if longest > args.pack_length:
        raise run.UserError(
            f"--pack-length {args.pack_length}: shorter than the rows in {args.data} (tokenized "
            f"with --max-length {longest}); give --pack-length {_round_up(longest)} or more"
        )
    if plan.settings["mask_token_id"] is None:
        raise run.UserError(
            f"{args.data} was tokenized with --mask-token none, but a drafter needs a mask token"
        )
    dataset.wait_for_shard(
        0, timeout_s=args.shard_timeout, poll_s=SHARD_POLL_S, on_wait=waiting.for_("shard 0")
    )
    return dataset


def _round_up(length: int) -> int:
    return -(-length // PACK_MULTIPLE) * PACK_MULTIPLE


def open_hidden_states(
    args: argparse.Namespace, device: torch.device, log: Any, stop: StopRequest
) -> HiddenStates:
    """Connect to the servers, open the files, or load the target beside the drafter."""
    if args.hidden_states == "colocated":
        target = Target.load(
            args.target, layers=args.layers, dtype=getattr(torch, args.dtype), device=device
        )
        return ColocatedHiddenStates(target, max_tokens_per_request=args.pack_length)
    if not re.fullmatch(f"{ADDRESS}(,{ADDRESS})*", args.hidden_states):
        return StoredHiddenStates(
            args.hidden_states, cache_dir=args.cache_dir, endpoint_url=args.endpoint_url
        )
    return ServedHiddenStates(
        args.hidden_states.split(","),
        token=read_secret(args.token_file),
        tls_root_certs=read_secret(args.tls_root_certs),
        connect_timeout_s=args.server_timeout,
        on_wait=Waiting(log, stop).for_(f"server {args.hidden_states}"),
    )


def read_draft_config(path: Path) -> DrafterConfig:
    try:
        return DrafterConfig.from_json(json.loads(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise run.UserError(f"--draft-config {path}: {error}") from error


def settle_layers(args: argparse.Namespace) -> tuple[int, ...]:
    """The tapped layers: --layers, else those of --draft-config, else evenly spread ones."""
    if args.layers is not None:
        return args.layers
    if args.draft_config is not None:
        return read_draft_config(args.draft_config).target_layer_ids
    return default_target_layers(target_facts(args.target).num_layers)


def drafter_config(args: argparse.Namespace, mask_token_id: int) -> DrafterConfig:
    """The drafter's shape: from --draft-config, or from the target's and the flags."""
    facts = target_facts(args.target)
    if args.draft_config is not None:
        config = read_draft_config(args.draft_config)
        expected = {
            "hidden_size": (config.hidden_size, facts.hidden_size),
            "vocab_size": (config.vocab_size, facts.vocab_size),
            "num_target_layers": (config.num_target_layers, facts.num_layers),
            "target_layer_ids": (config.target_layer_ids, tuple(args.layers)),
            "mask_token_id": (config.mask_token_id, mask_token_id),
        }
        for name, (got, want) in expected.items():
            if got != want:
                raise run.UserError(
                    f"--draft-config {args.draft_config}: its {name} is {got}; the target, the "
                    f"data and the flags say {want}"
                )
        return config
    return DrafterConfig.for_target(
        hidden_size=facts.hidden_size,
        intermediate_size=facts.intermediate_size,
        vocab_size=facts.vocab_size,
        num_target_layers=facts.num_layers,
        rms_norm_eps=facts.rms_norm_eps,
        rope_theta=facts.rope_theta,
        max_position_embeddings=facts.max_position_embeddings,
        eos_token_id=facts.eos_token_id,
        target_layer_ids=args.layers,
        num_layers=args.draft_layers,
        block_size=args.block_size,
        mask_token_id=mask_token_id,
        sliding_window=args.sliding_window,
    )


def check_parts(args: argparse.Namespace, hidden_states: HiddenStates, plan: Plan) -> None:
    """Refuse hidden states or data that were made for another target than --target."""
    facts, have = target_facts(args.target), hidden_states.description
    expected = {
        "layers": (tuple(args.layers), tuple(have.layers)),
        "hidden_size": (facts.hidden_size, have.hidden_size),
        "vocab_size": (facts.vocab_size, have.vocab_size),
    }
    for name, (want, got) in expected.items():
        if want != got:
            raise run.UserError(
                f"--hidden-states {args.hidden_states}: its {name} is {got}, not {want}; "
                "start the server with the same --target and --layers"
            )
    if have.max_tokens_per_request < args.pack_length:
        raise run.UserError(
            f"--hidden-states {args.hidden_states} answers {have.max_tokens_per_request} tokens a "
            f"request, a pack holds up to {args.pack_length}: raise its --max-tokens-per-request"
        )
    if plan.settings["vocab_size"] > facts.vocab_size:
        raise run.UserError(
            f"{args.data} uses ids up to {plan.settings['vocab_size'] - 1}, "
            f"but {args.target} has {facts.vocab_size}: it was tokenized for another target"
        )


def run_settings(args: argparse.Namespace, have: Any, config: DrafterConfig, plan: Plan) -> dict:
    """What decides the weights: compared on a resume, kept in every checkpoint."""
    chosen = {key: value for key, value in vars(args).items() if key not in FREE_FLAGS}
    chosen["draft_config"] = config.to_json()
    chosen["plan_sha256"] = plan.sha256
    chosen["weights_fingerprint"] = have.weights_fingerprint
    return json.loads(run.json_bytes(chosen))


def build_drafter(
    config: DrafterConfig, args: argparse.Namespace, world: dist.World
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The drafter with fresh float32 weights, sharded over all ranks, and its AdamW."""
    drafter = Drafter(config)
    drafter.reset_parameters(seed=args.seed)
    drafter.to(world.device)
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, args.dtype), reduce_dtype=torch.float32
    )
    for module in (*drafter.layers, drafter):
        fully_shard(module, mesh=world.mesh, mp_policy=policy)
        module.set_gradient_divide_factor(1.0)  # gradients add up over ranks, as the loss does
        module.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.AdamW(
        drafter.parameters(),
        lr=args.learning_rate,
        betas=ADAM_BETAS,
        weight_decay=0.0,
        fused=world.device.type == "cuda",
    )
    return drafter, optimizer


# ---- one step


def train_step(
    setup: Setup,
    drafter: Any,
    optimizer: torch.optim.Optimizer,
    ready: ReadyStep,
    step: int,
    *,
    horizon: int,
    data_wait_s: float,
) -> dict[str, Any]:
    """One optimizer step on the global batch; its line of metrics."""
    began, args = time.monotonic(), setup.args
    batches = micro_batches(
        ready,
        setup.config,
        step=step,
        seed=args.seed,
        size=args.micro_batch,
        num_anchors=setup.num_anchors,
        gamma=args.gamma,
        device=setup.world.device,
    )
    sums = accumulate_gradients(
        drafter,
        setup.config,
        setup.ends,
        batches,
        attention=args.attention,
        world=setup.world,
    )
    norm = nn.utils.clip_grad_norm_(drafter.parameters(), MAX_GRAD_NORM)
    rate = learning_rate(
        step, peak=args.learning_rate, warmup_ratio=args.warmup_ratio, horizon=horizon
    )
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()
    step_s = data_wait_s + time.monotonic() - began
    return {
        "step": step,
        "loss": sums.loss,
        "slot_accuracy": sums.correct / max(sums.supervised, 1),
        "grad_norm": float(norm.full_tensor() if isinstance(norm, DTensor) else norm),
        "learning_rate": rate,
        "tokens": sums.tokens,
        "anchors": sums.anchors,
        "step_s": step_s,
        "data_wait_s": data_wait_s,
        "tokens_per_s": sums.tokens / step_s,
    }


# ---- the run


@dataclass
class RunState:
    """Where the run stands; `saved` and `evaluated` are the steps at which that was done last."""

    step: int
    cursor: Cursor
    horizon: int
    saved: int = -1
    evaluated: int = -1


def open_checkpoints(
    args: argparse.Namespace, world: dist.World, log: Any
) -> checkpoint.Checkpoints:
    """The run folder's checkpoints, and their mirror by --checkpoint-uri."""
    folder, mirror = args.output / "checkpoints", None
    if args.checkpoint_uri is not None and world.is_main:
        journal = args.output / "uploads.journal"
        abort_left_uploads(journal, endpoint_url=args.endpoint_url)
        store = open_store(
            args.checkpoint_uri,
            endpoint_url=args.endpoint_url,
            sse=args.sse,
            sse_kms_key=args.sse_kms_key,
            upload_journal=journal,
        )
        store.check_writable()
        mirror = Mirror(store, folder, keep=args.keep, keep_every=args.keep_every, log=log)
    return checkpoint.Checkpoints(
        folder, world=world, keep=args.keep, keep_every=args.keep_every, mirror=mirror, log=log
    )


def find_resume(args: argparse.Namespace, checkpoints: checkpoint.Checkpoints) -> Path | None:
    """The checkpoint to go on from, by --resume; None to start afresh."""
    if args.resume == "auto":
        return checkpoints.newest()
    if args.resume != "never":
        return Path(args.resume)
    if where := checkpoints.occupied():
        raise run.UserError(
            f"--resume never: {where} holds checkpoints already; choose another place, or delete it"
        )
    return None


def refuse_changes(
    args: argparse.Namespace, where: Path | str, old: Mapping[str, Any], new: Mapping[str, Any]
) -> None:
    """Compare the settings of the run in the run folder or the mirror with this command's."""
    allowed = {name.strip().replace("-", "_") for name in args.allow_change.split(",")}
    changed = [
        f"{key}: {old.get(key)} -> {new.get(key)}"
        for key in sorted({*old, *new} - allowed)
        if old.get(key) != new.get(key)
    ]
    if changed:
        raise run.UserError(
            f"{where} holds a run with other settings ({'; '.join(changed)}).\n"
            "Use another place, or name what may change in --allow-change"
        )


def evaluate_now(
    setup: Setup, drafter: nn.Module, state: RunState, log: Any, journal: Journal | None
) -> None:
    """Evaluate on the first held-out rows of the shards up to the cursor, and write it down."""
    args = setup.args
    seen = state.cursor.position + 1 if state.cursor.epoch == 0 else setup.dataset.num_shards
    shards = (
        setup.dataset.wait_for_shard(index, timeout_s=args.shard_timeout) for index in range(seen)
    )
    packs, rows = held_out_packs(
        shards,
        seed=args.seed,
        fraction=args.eval_fraction,
        max_rows=args.eval_rows,
        pack_length=args.pack_length,
    )
    state.evaluated = state.step
    if rows == 0:
        return
    drafter.eval()
    result = evaluate(
        drafter,
        setup.config,
        setup.ends,
        setup.hidden_states,
        packs=packs,
        rows=rows,
        num_anchors=setup.num_anchors,
        gamma=args.gamma,
        attention=args.attention,
        world=setup.world,
    )
    drafter.train()
    if journal is not None:
        log.info(
            f"step={state.step} eval_loss={result.loss:.4f} "
            f"acceptance={result.acceptance_length:.3f} "
            f"walked_acceptance={result.walked_acceptance_length:.3f} rows={result.rows}"
        )
        journal.write(
            {
                "step": state.step,
                "eval_loss": result.loss,
                "eval_acceptance_length": result.acceptance_length,
                "eval_walked_acceptance_length": result.walked_acceptance_length,
                "eval_slot_accuracy": list(result.slot_accuracy),
                "eval_rows": result.rows,
            }
        )
        journal.draw_curves()


def save_checkpoint(
    setup: Setup,
    drafter: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: RunState,
    *,
    finished: bool,
) -> None:
    """Begin to save everything a resume needs in a folder of this step."""
    setup.checkpoints.save(
        state.step,
        model=drafter,
        optimizer=optimizer,
        state={
            "cursor": vars(state.cursor),
            "finished": finished,
            "horizon": state.horizon,
            "settings": setup.settings,
        },
    )
    state.saved = state.step


def train(
    setup: Setup,
    drafter: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: RunState,
    *,
    stop: StopRequest,
    journal: Journal | None,
    log: Any,
) -> bool:
    """Step until the data or --max-steps end: True; False when a stop request came first.

    Raises the UserError that ended it, with the steps so far saved.
    """
    args, world = setup.args, setup.world
    feed = StepFeed(
        step_stream(setup, stop, log).steps(state.cursor),
        setup.hidden_states,
        share=args.global_batch // world.size,
        rank=world.rank,
        depth=1 if args.hidden_states == "colocated" else args.prefetch,
    )
    with contextlib.closing(feed):
        at_end, failure = take_steps(
            setup, drafter, optimizer, state, feed, stop=stop, journal=journal, log=log
        )
    finished = world.sum([float(not at_end)])[0] == 0
    if finished and args.eval_rows and state.evaluated != state.step:
        try:
            evaluate_now(setup, drafter, state, log, journal)
        except run.UserError as error:
            failure, finished = error, False
    if state.step == 0 and finished:
        raise run.UserError(
            f"nothing to train on: every row in {args.data} is held out (--eval-fraction "
            f"{args.eval_fraction}), or there is none"
        )
    if state.step > 0 and (finished or state.saved != state.step):
        save_checkpoint(setup, drafter, optimizer, state, finished=finished)
    if failure is not None:
        raise failure
    setup.checkpoints.wait()
    return finished


def take_steps(
    setup: Setup,
    drafter: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: RunState,
    feed: StepFeed,
    *,
    stop: StopRequest,
    journal: Journal | None,
    log: Any,
) -> tuple[bool, run.UserError | None]:
    """The training loop. Whether this rank came to the end, and what it failed on if it did."""
    args, failure = setup.args, None
    bar = run.Progress(log, total=state.horizon, unit="step") if journal is not None else None
    if bar is not None:
        bar.start_at(state.step)
    while True:
        ready, asked = None, time.monotonic()
        try:
            if args.eval_rows and state.step % args.eval_every == 0:
                evaluate_now(setup, drafter, state, log, journal)
                asked = time.monotonic()
            if args.max_steps is None or state.step < args.max_steps:
                ready = feed.next(lambda: stop.signum is not None)
        except run.UserError as error:  # a shard or a server that did not come: save, then say so
            failure = error
        except Stopped:
            pass  # the shards' thread saw the stop request first
        if not setup.world.agree(ready is not None):
            break
        assert ready is not None
        state.step += 1
        entry = train_step(
            setup,
            drafter,
            optimizer,
            ready,
            state.step,
            horizon=state.horizon,
            data_wait_s=time.monotonic() - asked,
        )
        state.cursor = ready.step.after
        if journal is not None and bar is not None:
            journal.write(entry)
            bar.update(1, loss=f"{entry['loss']:.3f}")
            if state.step == 1 or state.step % args.log_every == 0:
                log.info(step_line(entry, state.horizon))
        if state.step % args.save_every == 0:
            save_checkpoint(setup, drafter, optimizer, state, finished=False)
    if bar is not None:
        bar.close()
    return ready is None and stop.signum is None and failure is None, failure


def step_stream(setup: Setup, stop: StopRequest, log: Any) -> StepStream:
    """The steps of this run's data; waits for shards that are not committed yet."""
    args, dataset, waiting = setup.args, setup.dataset, Waiting(log, stop)

    def open_shard(index: int) -> Shard:
        return dataset.wait_for_shard(
            index,
            timeout_s=args.shard_timeout,
            poll_s=SHARD_POLL_S,
            on_wait=waiting.for_(f"shard {index}"),
        )

    return StepStream(
        num_shards=dataset.num_shards,
        open_shard=open_shard,
        prefetch=dataset.prefetch,
        plan_sha256=dataset.plan.sha256,
        seed=args.seed,
        epochs=args.epochs,
        pack_length=args.pack_length,
        global_batch=args.global_batch,
        eval_fraction=args.eval_fraction,
    )


def step_line(entry: Mapping[str, Any], horizon: int) -> str:
    """One greppable line about a step."""
    return run.format_fields(
        {
            "step": f"{entry['step']}/{horizon}",
            "loss": f"{entry['loss']:.4f}",
            "slot_accuracy": f"{entry['slot_accuracy']:.3f}",
            "grad_norm": f"{entry['grad_norm']:.3f}",
            "lr": f"{entry['learning_rate']:.2e}",
            "tokens/s": run.format_count(entry["tokens_per_s"]),
            "step_s": f"{entry['step_s']:.2f}",
            "data_wait_s": f"{entry['data_wait_s']:.2f}",
        }
    )


# ---- start and end


def prepare(
    args: argparse.Namespace,
    world: dist.World,
    log: Any,
    stop: StopRequest,
    closing: contextlib.ExitStack,
    checkpoints: checkpoint.Checkpoints,
) -> Setup:
    """Open the data and the hidden states, check that they belong together, settle the shape."""
    if args.global_batch % (world.size * args.micro_batch):
        raise run.UsageError(
            f"--global-batch {args.global_batch}: must be a multiple of {world.size} ranks x "
            f"--micro-batch {args.micro_batch}"
        )
    args.layers = settle_layers(args)
    dataset = open_dataset(args, log, stop)
    config = drafter_config(args, dataset.plan.settings["mask_token_id"])
    hidden_states = open_hidden_states(args, world.device, log, stop)
    closing.callback(hidden_states.close)
    check_parts(args, hidden_states, dataset.plan)
    if isinstance(hidden_states, ColocatedHiddenStates):
        target = hidden_states.target
        ends = TargetEnds(target.embedding, target.head)
    else:
        dtype = getattr(torch, args.dtype)
        ends = TargetEnds(*read_embedding_and_head(args.target, dtype=dtype, device=world.device))
    return Setup(
        args=args,
        world=world,
        dataset=dataset,
        hidden_states=hidden_states,
        ends=ends,
        config=config,
        num_anchors=int(args.anchor_ratio * args.pack_length),
        settings=run_settings(args, hidden_states.description, config, dataset.plan),
        checkpoints=checkpoints,
    )


def restore(
    setup: Setup,
    drafter: nn.Module,
    optimizer: torch.optim.Optimizer,
    resumed: Path | None,
    old: Mapping[str, Any] | None,
) -> RunState:
    """The state to go on from: a checkpoint's (`old`), or a fresh one with its horizon set."""
    if resumed is not None and old is not None:
        checkpoint.load(resumed, model=drafter, optimizer=optimizer)
        return RunState(old["step"], Cursor(**old["cursor"]), old["horizon"], saved=old["step"])
    args, plan = setup.args, setup.dataset.plan
    first_shard = setup.dataset.wait_for_shard(0, timeout_s=args.shard_timeout)
    horizon = training_horizon(
        max_steps=args.max_steps,
        epochs=args.epochs,
        planned_bytes=plan.planned_bytes,
        first_shard_bytes=plan.shard_bytes(0),
        first_shard_tokens=first_shard.record["tokens"],
        tokens_per_step=args.global_batch * args.pack_length,
    )
    return RunState(0, Cursor(), horizon)


def write_run_json(setup: Setup, *, started: str, counts: Mapping[str, Any]) -> None:
    facts = run.run_facts(settings=vars(setup.args), started=started, counts=counts)
    facts["training_settings"] = setup.settings
    run.write_atomic(setup.args.output / "run.json", run.json_bytes(facts))


def previous_settings(output: Path, old: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The settings of the run that goes on, or that `output` holds; None when there is none."""
    if old is not None:
        return old["settings"]
    path = output / "run.json"
    return json.loads(path.read_bytes())["training_settings"] if path.exists() else None


def summary_rows(setup: Setup, state: RunState, parameters: int) -> list[tuple[str, Any]]:
    """What was trained, how well it drafts now, and where it lies."""
    evaluations = [e for e in read_metrics(setup.args.output) if "eval_loss" in e]
    before = next((e for e in evaluations if e["step"] == 0), None)
    after = next((e for e in reversed(evaluations) if e["step"] > 0), None)

    def figure(entry: Mapping[str, Any] | None, key: str) -> str:
        return "-" if entry is None else f"{entry[key]:.3f} ({entry['eval_rows']} rows)"

    def before_after(key: str) -> str:
        return f"{figure(before, key)} -> {figure(after, key)}"

    accuracy = " ".join(f"{value:.2f}" for value in after["eval_slot_accuracy"]) if after else "-"
    return [
        ("target", setup.args.target),
        ("drafter parameters", run.format_count(parameters)),
        ("steps", f"{state.step:,}"),
        ("held-out loss", before_after("eval_loss")),
        ("acceptance length, all anchors", before_after("eval_acceptance_length")),
        ("acceptance length, walked", before_after("eval_walked_acceptance_length")),
        ("accuracy of slots 1, 2, ...", accuracy),
        ("export", setup.args.output / "export"),
        ("curves", setup.args.output / "curves.png"),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    started, began = run.utc_now(), time.monotonic()
    stop = StopRequest()
    if args.device == "cpu":
        torch.set_num_threads(1)  # a second thread makes matrices this small far slower
    with dist.start(args.device) as world:
        make_folder(args.output)
        log = run.setup_logging(
            "train" if world.is_main else f"train[{world.rank}]",
            debug=args.debug,
            log_file=args.output / "train.log" if world.is_main else None,
        )
        try:
            with (
                run_folder_lock(args.output, is_main=world.is_main),
                contextlib.ExitStack() as closing,
            ):
                return run_training(
                    args, world, log, stop, started=started, began=began, closing=closing
                )
        except Stopped:
            return stop.exit_code


def run_training(
    args: argparse.Namespace,
    world: dist.World,
    log: Any,
    stop: StopRequest,
    *,
    started: str,
    began: float,
    closing: contextlib.ExitStack,
) -> int:
    """Prepare, resume, train, export, tell. What has to be closed at the end goes on `closing`."""
    if world.is_main:
        run.print_settings(log, vars(args))
    checkpoints = open_checkpoints(args, world, log)
    closing.callback(checkpoints.close)
    resumed = find_resume(args, checkpoints)
    old = checkpoint.read_state(resumed) if resumed is not None else None
    setup = prepare(args, world, log, stop, closing, checkpoints)
    previous = previous_settings(args.output, old)
    if previous is not None:
        refuse_changes(args, args.output, previous, setup.settings)
    mirrored = checkpoints.mirrored_state()
    if mirrored is not None:
        refuse_changes(args, args.checkpoint_uri, mirrored["settings"], setup.settings)
    exported = (args.output / "export/config.json").exists()
    if old is not None and old["finished"] and exported:
        log.info(f"nothing to do: {resumed} is the end of this run")
        return 0
    drafter, optimizer = build_drafter(setup.config, args, world)
    parameters = sum(parameter.numel() for parameter in drafter.parameters())
    state = restore(setup, drafter, optimizer, resumed, old)
    journal = None
    if world.is_main:
        write_run_json(setup, started=started, counts={"step": state.step})
        journal = Journal(args.output, resume_step=state.step)
        closing.callback(journal.close)
        log.info(f"starting step={state.step} horizon={state.horizon} resumed={resumed}")
    finished = train(setup, drafter, optimizer, state, stop=stop, journal=journal, log=log)
    if finished:
        checkpoint.export(args.output / "export", model=drafter, config=setup.config, world=world)
    if journal is not None:
        journal.draw_curves()
        write_run_json(setup, started=started, counts={"step": state.step, "finished": finished})
        wall = ("wall time", run.format_duration(time.monotonic() - began))
        run.print_table("Training", [*summary_rows(setup, state, parameters), wall])
    if finished:
        return 0
    return stop.exit_code


if __name__ == "__main__":
    run.exit_with(main, skip_teardown=True)
