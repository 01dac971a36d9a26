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
  torchrun --nproc-per-node 4 --signals-to-handle SIGTERM,SIGINT --shutdown-timeout 1800 \\
      train_dflash_online.py --data s3://bucket/tokens/ --target Qwen3.6-27B --output runs/a \\
      --hidden-states colocated

Exit codes: 0 done, 1 failed, 2 usage; a single process ends with 143 after SIGTERM and 130 after
Ctrl-C, with the step finished and saved (torchrun itself returns 1 then).
"""

import argparse
import contextlib
import errno
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common import checkpoint, dist, run
from common.batches import PACK_MULTIPLE, Cursor, ShardPacking, StepStream
from common.drafter_config import ARCHITECTURES
from common.evaluating import evaluate_only, run_defaults
from common.export import FORMATS, export, export_config, exported_layout
from common.feed import ReadyStep, StepFeed
from common.gpus import DEFAULT_GPU, GPUS
from common.guards import Guards
from common.journal import REPORTERS, Journal
from common.lifetime import (
    Stopped,
    StopRequest,
    Waiting,
    make_folder,
    refuse_files,
    run_folder_lock,
)
from common.losses import DEFAULT_GAMMA, LOSSES, needs_teacher
from common.planner_tables import print_plan
from common.resuming import find_resume, former_settings, previous_settings, refuse_changes
from common.schedule import known_horizon, training_horizon
from common.setup import (
    SHARD_POLL_S,
    Setup,
    build_drafter,
    given_config,
    open_checkpoints,
    open_mirror,
    prepare,
)
from common.shards import Shard
from common.status import Status, print_status
from common.store import Store, add_store_arguments, add_store_write_arguments
from common.telling import StepProgress, print_dry_run, print_summary, shard_line
from common.training import (
    RunState,
    Training,
    dry_step,
    evaluate_now,
    refuse_export,
    save_checkpoint,
    train_step,
)
from common.verify import print_checks, verify

NEEDED = ("data", "target", "output")  # to train
NEEDED_TO_PLAN = ("target",)
RUN_FOLDERS = ("checkpoints", "export", "tensorboard")
MAX_PACK_LENGTH, MAX_SEED = 1 << 20, (1 << 63) - 1

# Settings that a place inside a shard depends on.
PACKING_SETTINGS = frozenset(["eval_fraction", "global_batch", "pack_length", "seed"])

# Flags that say where and how fast, not what is trained: a resumed run may change them freely.
FREE_FLAGS = frozenset(
    [
        "allow_change",
        "attention",
        "cache_dir",
        "cache_gb",
        "checkpoint",
        "checkpoint_layers",
        "checkpoint_uri",
        "compile",
        "data",
        "debug",
        "decode",
        "draft",  # draft_config says it
        "draft_cost",
        "dry_run",
        "endpoint_url",
        "eval_every",
        "export_format",
        "eval_only",
        "force",
        "gpu",
        "gpus",
        "hidden_states",
        "keep",
        "keep_every",
        "log_every",
        "micro_batch",
        "output",
        "plan",
        "prefetch",
        "report_to",
        "resume",
        "save_every",
        "server_timeout",
        "shard_timeout",
        "sse",
        "sse_kms_key",
        "status",
        "target",
        "temperature",
        "tls_root_certs",
        "token_file",
        "verify_export",
    ]
)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = run.make_parser(__doc__)
    add_data_arguments(parser)
    add_target_arguments(parser)
    add_drafter_arguments(parser)
    add_training_arguments(parser)
    add_evaluation_arguments(parser)
    add_output_arguments(parser)
    add_instead_arguments(parser)
    args = parser.parse_args(argv)
    try:
        if args.eval_only and args.output is not None and "://" not in args.output:
            parser.set_defaults(**run_defaults(args))
            args = parser.parse_args(argv)
        return resolve(args)
    except run.UsageError as error:
        parser.error(str(error))


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    group.add_argument("--data", help="stage 1's output: s3://... or a folder")
    add_store_arguments(group)
    group.add_argument("--cache-dir", type=Path, help="local copies of shards [OUTPUT/cache]")
    # Twice the 902 k samples of the README's recipe: each shard is fetched once, not once an epoch.
    group.add_argument(
        "--cache-gb",
        type=run.positive_float,
        default=20.0,
        help="of them to keep, besides those in use",
    )
    group.add_argument(
        "--shard-timeout", type=run.positive_float, default=1800.0, help="seconds to wait for one"
    )


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("target")
    group.add_argument("--target", help="folder or hub id of the target")
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


def add_drafter_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("drafter")
    group.add_argument(
        "--draft", choices=tuple(ARCHITECTURES), help="dflash2: with convolutions and a selector "
        "of drafts, all layers sliding [dflash]",
    )  # fmt: skip
    group.add_argument(
        "--draft-config", type=Path, help="config.json to take the shape from instead"
    )
    group.add_argument("--draft-layers", type=run.positive_int, help="depth of the drafter [5]")
    group.add_argument(
        "--block-size", type=run.positive_int, help="the anchor and the drafts [16, dflash2 8]"
    )
    group.add_argument(
        "--sliding-window", type=run.non_negative_int, help="0: all layers full [2048]"
    )
    group.add_argument("--init-from", type=Path, help="folder of a drafter to go on from")


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument("--pack-length", type=run.positive_int, default=4096, help="tokens a pack")
    group.add_argument("--global-batch", type=run.positive_int, default=8, help="packs a step")
    group.add_argument("--micro-batch", type=run.positive_int, default=1, help="packs a forward")
    group.add_argument(
        "--anchor-ratio", type=run.fraction, default=0.125, help="anchors per token of a pack"
    )
    group.add_argument(
        "--loss", choices=LOSSES, default="ce", help="kd, tv and ce+tv want servers with --final"
    )
    group.add_argument(
        "--gamma",
        type=run.non_negative_float,
        help=f"slot weight decay; 0: none [{DEFAULT_GAMMA:g}, with dpace 0]",
    )
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
    group.add_argument("--compile", action="store_true", help="the layers, on CUDA")
    group.add_argument(
        "--checkpoint-layers", action="store_true", help="less memory: activations made again"
    )
    group.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: CUDA where there is one",
    )


def add_evaluation_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("evaluation")
    group.add_argument("--eval-fraction", type=run.fraction, default=0.005, help="of rows held out")
    group.add_argument("--eval-rows", type=run.non_negative_int, default=256, help="0: never")
    group.add_argument("--eval-every", type=run.positive_int, default=1000, help="steps")
    group.add_argument(
        "--temperature", type=run.positive_float, default=1.0, help="of the expected acceptance"
    )
    group.add_argument(
        "--checkpoint", type=Path, help="with --eval-only: a step's folder [newest of --output]"
    )
    group.add_argument(
        "--decode", type=run.non_negative_int, default=0, metavar="N",
        help="with --eval-only: decode so many rows for real, greedy and at --temperature",
    )  # fmt: skip
    group.add_argument(
        "--draft-cost", type=run.non_negative_float,
        help="with --eval-only: of a block, in steps of the target [by parameters]",
    )  # fmt: skip


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--output", type=str, help="run folder, local")
    group.add_argument("--save-every", type=run.positive_int, default=1000, help="steps")
    group.add_argument("--keep", type=run.positive_int, default=3, help="newest checkpoints kept")
    group.add_argument(
        "--keep-every", type=run.positive_int, help="keep those at multiples of it too, in steps"
    )
    group.add_argument(
        "--checkpoint-uri", help="s3://... or a folder that checkpoints are copied to [nowhere]"
    )
    add_store_write_arguments(group)
    group.add_argument(
        "--export-format", choices=FORMATS, default="zlab", help="speculators: with the target's "
        "embedding and head in it",
    )  # fmt: skip
    group.add_argument("--log-every", type=run.positive_int, default=10, help="steps")
    group.add_argument("--resume", default="auto", help="auto, never, or a checkpoint folder")
    group.add_argument(
        "--allow-change", default="", help="settings a resume may change, comma-separated"
    )
    group.add_argument(
        "--force", action="store_true", help="export a drafter that ignores its context too"
    )
    group.add_argument(
        "--report-to", choices=("none", *REPORTERS), default="none", help="beside TensorBoard"
    )


def add_instead_arguments(parser: argparse.ArgumentParser) -> None:
    titled = parser.add_argument_group("instead of training")
    group = titled.add_mutually_exclusive_group()
    group.add_argument(
        "--eval-only", action="store_true",
        help="judge a checkpoint, or --init-from, on held-out rows: report.html in --output",
    )  # fmt: skip
    group.add_argument("--dry-run", action="store_true", help="one step: the memory and the time")
    group.add_argument(
        "--plan", action="store_true",
        help="does it fit, how long does it take: from --target's config.json, and --data if given",
    )  # fmt: skip
    group.add_argument("--status", metavar="RUN", help="where a run stands, and exit")
    group.add_argument(
        "--verify-export", metavar="DIR", type=Path, help="whether engines load a drafter, and exit"
    )
    titled.add_argument(
        "--gpu", choices=(*GPUS, "auto"), default=DEFAULT_GPU,
        help="with --plan: the kind of GPU; auto: this machine's, measured",
    )  # fmt: skip
    titled.add_argument(
        "--gpus", type=run.positive_int, help="with --plan: how many [4, with auto all]"
    )


def resolve(args: argparse.Namespace) -> argparse.Namespace:
    """Check the flags against each other and settle the ones that say auto."""
    if args.status is not None or args.verify_export is not None:
        return args
    needed = NEEDED_TO_PLAN if args.plan else NEEDED
    missing = [f"--{name}" for name in needed if not getattr(args, name)]
    if missing:
        raise run.UsageError(f"the following arguments are required: {', '.join(missing)}")
    if "://" in (args.output or ""):
        raise run.UsageError(
            f"--output {args.output}: must be a local folder; --checkpoint-uri copies its "
            "checkpoints there"
        )
    if (args.sse or args.sse_kms_key) and not (args.checkpoint_uri or "").startswith("s3://"):
        raise run.UsageError("--sse, --sse-kms-key: only with --checkpoint-uri s3://...")
    if args.checkpoint is not None and (not args.eval_only or args.init_from is not None):
        raise run.UsageError("--checkpoint: only with --eval-only, and not beside --init-from")
    if args.decode and not args.eval_only:
        raise run.UsageError("--decode: only with --eval-only")
    if args.eval_only and args.eval_rows == 0:
        raise run.UsageError("--eval-rows 0: --eval-only needs rows")
    if args.pack_length % PACK_MULTIPLE:
        raise run.UsageError(
            f"--pack-length {args.pack_length}: must be a multiple of {PACK_MULTIPLE}"
        )
    if args.pack_length > MAX_PACK_LENGTH or args.seed > MAX_SEED:
        raise run.UsageError(
            f"--pack-length may be {MAX_PACK_LENGTH:,} at most, --seed {MAX_SEED:,}"
        )
    if args.block_size == 1:
        raise run.UsageError("--block-size 1: must be at least 2, the anchor and one draft")
    if int(args.anchor_ratio * args.pack_length) < 1:
        raise run.UsageError(f"--anchor-ratio {args.anchor_ratio}: gives no anchor in a pack")
    if args.plan:  # of another machine, and without a run folder
        return args
    args.output = Path(args.output)
    args.cache_dir = args.cache_dir or args.output / "cache"
    if args.gamma is None:
        args.gamma = 0.0 if args.loss == "dpace" else DEFAULT_GAMMA
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
    if args.compile and args.device == "cpu":
        raise run.UsageError("--compile: only on CUDA; on a CPU the shapes of attention change")
    return args


# ---- the loop


def train(training: Training) -> bool:
    """Step until the data or --max-steps end: True; False when a stop request came first.

    Raises the UserError that ended it, with the steps so far saved.
    """
    args, state = training.args, training.state
    with contextlib.closing(open_feed(training)) as feed:
        at_end, failure = take_steps(training, feed)
    finished = training.world.sum([float(not at_end)])[0] == 0
    if finished and args.eval_rows and state.evaluated != state.step:
        try:
            evaluate_now(training)
        except run.UserError as error:
            failure, finished = error, False
    if state.step == 0 and finished:
        raise run.UserError(
            f"nothing to train on: every row in {args.data} is held out (--eval-fraction "
            f"{args.eval_fraction}) or has no two generated tokens in a row in its first "
            f"--pack-length {args.pack_length}, or there is none"
        )
    if state.step > 0 and (finished or state.saved != state.step):
        save_checkpoint(training, finished=finished)
    if failure is not None:
        raise failure
    training.checkpoints.wait()
    return finished


def take_steps(training: Training, feed: StepFeed) -> tuple[bool, run.UserError | None]:
    """The training loop. Whether this rank came to the end, and what it failed on if it did."""
    args, state, world = training.args, training.state, training.world
    progress = StepProgress(training)
    with contextlib.closing(progress):
        while True:
            asked = time.monotonic()
            ready, failure = next_step(training, feed)
            waited = time.monotonic() - asked
            if not world.agree(ready is not None):
                return ready is None and training.stop.signum is None and failure is None, failure
            assert ready is not None
            try:  # what fails here fails on all ranks alike
                if progress.steps == 0:
                    progress.memory = dry_step(training, ready)
                if args.eval_rows and state.step % args.eval_every == 0:
                    evaluate_now(training)
                entry = train_step(training, ready, data_wait_s=waited)
            except run.UserError as error:
                return False, error
            state.step, state.cursor = state.step + 1, ready.step.after
            progress.tell(entry)
            if state.step % args.save_every == 0:
                save_checkpoint(training, finished=False)


def next_step(training: Training, feed: StepFeed) -> tuple[ReadyStep | None, run.UserError | None]:
    """The next step with its hidden states; None at the end or on a stop request, or why not."""
    args, state = training.args, training.state
    try:
        if args.max_steps is None or state.step < args.max_steps:
            return feed.next(lambda: training.stop.signum is not None), None
    except run.UserError as error:  # a shard or a server that did not come: save, then say so
        return None, error
    except Stopped:
        pass  # the shards' thread saw the stop request first
    return None, None


def open_feed(training: Training) -> StepFeed:
    """The steps from the cursor on, read and asked for ahead; waits for missing shards."""
    args, dataset = training.args, training.setup.dataset
    waiting = Waiting(training.log, training.stop)

    def open_shard(index: int) -> Shard:
        return dataset.wait_for_shard(
            index,
            timeout_s=args.shard_timeout,
            poll_s=SHARD_POLL_S,
            on_wait=waiting.for_(f"shard {index}", timeout_s=args.shard_timeout),
        )

    def on_shard(packing: ShardPacking) -> None:
        if training.world.is_main:
            training.log.info(shard_line(packing))

    stream = StepStream(
        num_shards=dataset.num_shards,
        open_shard=open_shard,
        prefetch=dataset.prefetch,
        order_key=dataset.plan.order_key,
        seed=args.seed,
        epochs=args.epochs,
        pack_length=args.pack_length,
        global_batch=args.global_batch,
        eval_fraction=args.eval_fraction,
        on_shard=on_shard,
    )
    return StepFeed(
        stream.steps(training.state.cursor),
        training.setup.hidden_states,
        share=args.global_batch // training.world.size,
        rank=training.world.rank,
        depth=1 if training.setup.is_colocated else args.prefetch,
        final=needs_teacher(args.loss),
    )


# ---- start and end


def changed_settings(
    setup: Setup, checkpoints: checkpoint.Checkpoints, old: Mapping[str, Any] | None, log: Any
) -> set[str]:
    """The settings that a resumed run changes. Raises UserError for one not in --allow-change."""
    args, changed = setup.args, set[str]()
    previous = previous_settings(args.output, old)
    if previous is not None:
        changed = refuse_changes(args, args.output, previous, setup.settings)
        if changed:
            log.warning(f"goes on with other settings than it began with: {sorted(changed)}")
    mirrored = checkpoints.mirrored_state()
    # a mirror that lags behind may hold the settings that the run had before --allow-change
    if mirrored is not None and mirrored["settings"] not in former_settings(old, setup.settings):
        refuse_changes(args, args.checkpoint_uri, mirrored["settings"], setup.settings)
    return changed


def export_drafter(training: Training) -> None:
    """Publish export/. Raises UserError for a drafter that ignores its context."""
    setup = training.setup
    refuse_export(training)
    export(
        setup.args.output / "export",
        model=training.drafter,
        config=setup.config,
        world=training.world,
        layout=setup.args.export_format,
        target=setup.args.target,
        ends=(setup.ends.embedding, setup.ends.head),
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
        return RunState(
            old["step"],
            Cursor(**old["cursor"]),
            old["horizon"],
            Guards.from_json(old["guards"]),
            former_settings(old, setup.settings),
            saved=old["step"],
        )
    return RunState(0, Cursor(), horizon_of(setup), Guards())


def horizon_of(setup: Setup) -> int:
    """How many steps the learning rate is laid over."""
    args, plan = setup.args, setup.dataset.plan
    tokens_per_step = args.global_batch * args.pack_length
    if setup.counted_tokens is not None:
        return known_horizon(
            max_steps=args.max_steps,
            epochs=args.epochs,
            tokens=setup.counted_tokens,
            tokens_per_step=tokens_per_step,
        )
    first_shard = setup.dataset.wait_for_shard(0, timeout_s=args.shard_timeout)
    return training_horizon(
        max_steps=args.max_steps,
        epochs=args.epochs,
        planned_bytes=plan.planned_bytes,
        first_shard_bytes=plan.shard_bytes(0),
        first_shard_tokens=first_shard.record["tokens"],
        tokens_per_step=tokens_per_step,
    )


def write_run_json(setup: Setup, *, started: str, counts: Mapping[str, Any]) -> None:
    facts = run.run_facts(settings=vars(setup.args), started=started, counts=counts)
    facts["training_settings"] = setup.settings
    run.write_atomic(setup.args.output / "run.json", run.json_bytes(facts))


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if args.status is not None:
        print_status(args.status, endpoint_url=args.endpoint_url)
        return 0
    if args.verify_export is not None:
        return print_checks(args.verify_export, verify(args.verify_export))
    if args.plan:
        return print_plan(args)
    started, began = run.utc_now(), time.monotonic()
    stop = StopRequest()
    if args.device == "cpu":
        torch.set_num_threads(1)  # a second thread makes matrices this small far slower
    with dist.start(args.device) as world, told_in_words(args):
        log = open_output(args, world)
        try:
            if args.eval_only:  # beside a run that goes on, if need be: its files are left alone
                run.raise_on_signals()  # there is nothing to save
                with contextlib.ExitStack() as closing:
                    return evaluate_only(args, world, log, stop, closing, free_flags=FREE_FLAGS)
            with (
                run_folder_lock(args.output, is_main=world.is_main),
                contextlib.ExitStack() as closing,
            ):
                mirror = open_mirror(args) if world.is_main else None
                status = None
                if world.is_main and not args.dry_run:
                    status = open_status(args, mirror, closing)
                checkpoints = open_checkpoints(args, mirror, world, log)
                closing.callback(checkpoints.close)
                return run_training(
                    args, world, log, stop, status, checkpoints,
                    started=started, began=began, closing=closing,
                )  # fmt: skip
        except Stopped:
            return stop.exit_code


@contextlib.contextmanager
def told_in_words(args: argparse.Namespace) -> Iterator[None]:
    """GPU memory and disk that run out are a UserError with a cure, wherever that happens."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise run.UserError(
            "out of GPU memory: lower --micro-batch, --anchor-ratio or --pack-length "
            f"({str(error).splitlines()[0]})"
        ) from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise run.UserError(
            f"--output {args.output}: the disk is full; make room and rerun to go on from the "
            "last checkpoint"
        ) from error


def open_output(args: argparse.Namespace, world: dist.World) -> Any:
    """Make the run folder, which all ranks must see, and the log; returns this rank's logger."""
    make_folder(args.output)
    refuse_files(args.output, RUN_FOLDERS)
    if not world.shares(args.output):
        raise run.UserError(
            f"--output {args.output}: must be one folder that the machines of all ranks share"
        )
    return run.setup_logging(
        "train" if world.is_main else f"train[{world.rank}]",
        debug=args.debug,
        log_file=args.output / "train.log" if world.is_main and not args.eval_only else None,
    )


def open_status(
    args: argparse.Namespace, mirror: Store | None, closing: contextlib.ExitStack
) -> Status:
    """The run's status.json, which gets the last word on how it ended."""
    status = Status(args.output, mirror=mirror)
    status.update(state="starting")

    def note_end(kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Stopped):
            status.update(state="stopped")
        elif error is not None:
            status.update(state="failed", last_error=str(error) or kind.__name__)
        status.close()

    closing.push(note_end)
    return status


def run_training(
    args: argparse.Namespace,
    world: dist.World,
    log: Any,
    stop: StopRequest,
    status: Status | None,
    checkpoints: checkpoint.Checkpoints,
    *,
    started: str,
    began: float,
    closing: contextlib.ExitStack,
) -> int:
    """Prepare, resume, train, export, tell. What has to be closed at the end goes on `closing`."""
    if world.is_main:
        run.print_settings(log, vars(args))
    resumed = find_resume(args, checkpoints, world)
    old = checkpoint.read_state(resumed) if resumed is not None else None
    setup = prepare(
        args, world, log, stop, closing, free_flags=FREE_FLAGS, given=given_config(args)
    )
    changed = changed_settings(setup, checkpoints, old, log)
    export_config(setup.config, layout=args.export_format, target=args.target)  # not at the end
    exported = exported_layout(args.output / "export") == args.export_format
    longer = changed & {"epochs", "max_steps"}
    if old is not None and old["finished"] and exported and not longer and not args.dry_run:
        log.info(f"nothing to do: {resumed} is the end of this run")
        if status is not None:
            status.update(state="finished", step=old["step"], horizon=old["horizon"])
        checkpoints.finish_mirror()
        return 0
    drafter, optimizer = build_drafter(setup.config, args, world)
    state = restore(setup, drafter, optimizer, resumed, old)
    if changed & PACKING_SETTINGS:
        state.cursor = replace(state.cursor, step=0)  # the shard at hand is packed anew
    if longer:
        state.horizon = horizon_of(setup)
    training = Training(setup, drafter, optimizer, state, checkpoints, stop, log, None, status)
    if args.dry_run:
        with contextlib.closing(open_feed(training)) as feed:
            print_dry_run(training, feed)
        return 0
    if world.is_main:
        write_run_json(setup, started=started, counts={"step": state.step})
        training.journal = Journal(
            args.output, resume_step=state.step, report_to=args.report_to, settings=setup.settings
        )
        closing.callback(training.journal.close)
        log.info(f"starting step={state.step} horizon={state.horizon} resumed={resumed}")
    finished = train(training)
    if finished:
        export_drafter(training)
    if training.journal is not None:
        training.journal.draw_curves()
        write_run_json(setup, started=started, counts={"step": state.step, "finished": finished})
        print_summary(training, finished=finished, wall_s=time.monotonic() - began)
    training.tell(state="finished" if finished else "stopped")
    if finished:
        checkpoints.finish_mirror()
    return 0 if finished else stop.exit_code


if __name__ == "__main__":
    run.exit_with(main, skip_teardown=True)
