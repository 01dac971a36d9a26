"""--plan: whether a run fits, how long it takes, and which split of the GPUs is best.

Reads the target's config.json and, where there is data, its plan and commit records: no weights,
no GPU. What it says of time rests on two shares of the GPU's peak, which nobody has measured for
these models yet.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from common.drafter_config import DrafterConfig
from common.flops import (
    DrafterWork,
    TargetWork,
    drafter_parameters,
    drafter_work,
    target_work,
    visible_keys,
)
from common.footprint import StepShape, server_memory, taps_bytes, trainer_memory
from common.gpus import GPUS, Gpu, measured_gpu
from common.loss import TILE_BYTES
from common.losses import needs_teacher
from common.run import UsageError, UserError, format_bytes
from common.setup import drafter_config, given_config, settle_layers
from common.shards import TokenizedDataset
from common.target_model import build_without_weights

TARGET_SHARE, DRAFTER_SHARE = 0.50, 0.45  # of the peak, of a forward and of training
RESERVED_BYTES = 3 << 30  # of a GPU: its CUDA context, libraries' buffers, fragments
STATE_BYTES = 12  # of a parameter in a checkpoint: float32, and two moments
ROW_BYTES = 4.2  # of a token in a shard: id and mask
DEFAULT_GPUS = 4
CURES = {  # for what does not fit; first those that cost least
    "hidden states": "less --global-batch or --pack-length",
    "activations": "--checkpoint-layers, or less --anchor-ratio, --micro-batch or --pack-length",
    "logits tile, backward": "less --anchor-ratio, --micro-batch or --pack-length",
    "master weights": "more GPUs that train, or fewer --draft-layers",
    "optimiser": "more GPUs that train, or fewer --draft-layers",
    "gradients": "a --global-batch of one forward a GPU, or fewer --draft-layers",
    "gathered weights": "fewer --draft-layers",
    "target layers": "GPUs with more memory",
    "embedding and head": "GPUs with more memory",
}


@dataclass(frozen=True)
class Data:
    """The tokens of an epoch, and of a row on average; `is_counted` when all shards are there."""

    tokens: float
    tokens_per_row: float
    shard_bytes: float
    is_counted: bool


@dataclass(frozen=True)
class Work:
    """What there is to do, in packs of `pack_tokens` made of documents of `document_tokens`."""

    target: TargetWork
    config: DrafterConfig
    pack_tokens: int
    document_tokens: float
    anchors: int  # of a pack
    teacher: bool

    @property
    def target_per_token(self) -> float:
        return self.target.forward(self.document_tokens)

    @property
    def drafter_parameters(self) -> int:
        layer, rest = drafter_parameters(self.config)
        return self.config.num_hidden_layers * layer + rest

    @property
    def wire_per_token(self) -> int:
        return taps_bytes(self.config, tokens=1, width=2, teacher=self.teacher)

    def drafter(self, anchors: int) -> DrafterWork:
        """FLOPs of a pack with so many blocks, all supervised, as most are."""
        return drafter_work(
            self.config,
            tokens=self.pack_tokens,
            anchors=anchors,
            supervised=anchors * (self.config.block_size - 1),
            visible=visible_keys(self.config, self.document_tokens),
            teacher=self.teacher,
        )


@dataclass(frozen=True)
class Split:
    """A way to use the GPUs: `servers` run the target alone, 0 of them is colocated.

    memory: bytes by role and item · seconds: for a token of the target's, of the drafter's and of
    the trainers' exchange, if each had to wait for itself alone.
    """

    servers: int
    trainers: int
    memory: Mapping[str, Mapping[str, float]]
    seconds: Mapping[str, float]
    balanced_ratio: float | None  # anchors per token at which neither side waits

    @property
    def name(self) -> str:
        if not self.servers:
            return f"colocated {self.trainers}"
        return f"served {self.servers}+{self.trainers}"

    @property
    def tokens_per_s(self) -> float:
        return 1 / max(self.seconds.values())

    @property
    def bottleneck(self) -> str:
        return max(self.seconds, key=lambda name: self.seconds[name])


def chosen_gpu(name: str) -> Gpu:
    """A GPU of the table, or with "auto" this machine's own."""
    if name == "auto":
        return measured_gpu()
    return GPUS[name]


def chosen_count(args: argparse.Namespace) -> int:
    """--gpus, else those of this machine with --gpu auto, else DEFAULT_GPUS."""
    seen = torch.cuda.device_count() if args.gpu == "auto" else DEFAULT_GPUS
    return args.gpus or seen


def read_data(args: argparse.Namespace) -> tuple[Data, int]:
    """What plan and commit records say, and the mask token. Raises UserError without them.

    Shards that are not committed are taken to be like those that are.
    """
    dataset = TokenizedDataset(args.data, cache_dir=Path(), endpoint_url=args.endpoint_url)
    plan = dataset.wait_for_plan(timeout_s=0)
    records = {index: dataset.record(index) for index in range(dataset.num_shards)}
    known = {index: record for index, record in records.items() if record is not None}
    tokens = sum(record["tokens"] for record in known.values())
    if not tokens:
        raise UserError(
            f"{args.data}: no shard with tokens is committed yet; leave --data out for figures "
            "per billion tokens"
        )
    share = sum(plan.shard_bytes(index) for index in known) / plan.planned_bytes
    rows = sum(record["rows"] for record in known.values())
    shard_bytes = sum(record["bytes"] for record in known.values())
    data = Data(tokens / share, tokens / rows, shard_bytes / share, len(known) == len(records))
    return data, plan.settings["mask_token_id"] or 0  # the trainer refuses data without one


def count_work(
    args: argparse.Namespace, *, document_tokens: float | None, mask_token_id: int
) -> Work:
    """Target and drafter, counted; documents of a whole pack unless their length is known."""
    given = given_config(args)
    args.layers = settle_layers(args, given)
    config = drafter_config(args, given, mask_token_id=mask_token_id)
    teacher = needs_teacher(args.loss)
    model = build_without_weights(args.target, layers=args.layers, final=teacher)
    return Work(
        target=target_work(model),
        config=config,
        pack_tokens=args.pack_length,
        document_tokens=min(document_tokens or args.pack_length, args.pack_length),
        anchors=int(args.anchor_ratio * args.pack_length),
        teacher=teacher,
    )


def step_shape(args: argparse.Namespace, work: Work, *, ranks: int) -> StepShape:
    """A rank's share of a step, in bf16; where --global-batch does not divide, rounded up."""
    return StepShape(
        ranks=ranks,
        forwards=math.ceil(args.global_batch / (ranks * args.micro_batch)),
        tokens=work.pack_tokens * args.micro_batch,
        anchors=work.anchors * args.micro_batch,
        width=2,
        tile_bytes=TILE_BYTES["cuda"],
        teacher=work.teacher,
        checkpoint_layers=args.checkpoint_layers,
    )


def exchange_bytes(work: Work, step: StepShape) -> float:
    """What a rank takes in for its sharded drafter, a token: weights twice a forward, gradients."""
    away = (step.ranks - 1) / step.ranks * work.drafter_parameters
    return away * (2 * step.width * step.forwards + 4) / (step.forwards * step.tokens)


def plan_split(
    args: argparse.Namespace, work: Work, gpu: Gpu, *, servers: int, trainers: int
) -> Split:
    """Memory and time of one split."""
    step = step_shape(args, work, ranks=trainers)
    peak = gpu.tflops * 1e12
    target_s = work.target_per_token / (TARGET_SHARE * peak)
    drafter = work.drafter(work.anchors)
    drafting = drafter.total + (repeated(drafter) if args.checkpoint_layers else 0.0)
    drafter_s = drafting / work.pack_tokens / (DRAFTER_SHARE * peak)
    exchange_s = exchange_bytes(work, step) / (gpu.link_gb_per_s * 1e9) / trainers
    memory = {
        "train": trainer_memory(work.target, work.config, step, colocated=not servers),
    }
    if not servers:
        seconds = {"compute": (target_s + drafter_s) / trainers, "exchange": exchange_s}
        return Split(servers, trainers, memory, seconds, None)
    memory["serve"] = server_memory(
        work.target, work.config, tokens=work.pack_tokens, width=2, teacher=work.teacher
    )
    seconds = {
        "target": target_s / servers,
        "drafter": drafter_s / trainers,
        "exchange": exchange_s,
    }
    # the drafter's work is a constant and a part for each anchor; it may take as long as the target
    fixed = work.drafter(0).total
    each = (drafting - fixed) / work.anchors
    allowed = target_s * work.pack_tokens * trainers / servers * DRAFTER_SHARE * peak
    ratio = (allowed - fixed) / each / work.pack_tokens
    return Split(servers, trainers, memory, seconds, ratio)


def repeated(work: DrafterWork) -> float:
    """FLOPs of the layers' second forward with --checkpoint-layers."""
    return sum(work.forward[part] for part in ("context", "blocks", "attention"))


def plan_splits(args: argparse.Namespace, work: Work, gpu: Gpu, gpus: int) -> list[Split]:
    """Colocated, and every served split of the GPUs."""
    return [
        plan_split(args, work, gpu, servers=servers, trainers=gpus - servers)
        for servers in range(gpus)
    ]


def misfit(items: Mapping[str, float], gpu: Gpu) -> str | None:
    """By how much they exceed the card, and the item to change and how; None when they fit.

    The first in the order of CURES that is larger than what is too much, else the largest.
    """
    over = sum(items.values()) - (gpu.memory_bytes - RESERVED_BYTES)
    if over <= 0:
        return None
    largest = max(items, key=lambda name: items[name])
    item = next((name for name in CURES if items.get(name, 0) > over), largest)
    return f"{format_bytes(over)} over; {item}: {CURES[item]}"


def split_misfit(split: Split, gpu: Gpu) -> str | None:
    """Which role does not fit, and why."""
    for role, items in split.memory.items():
        if reason := misfit(items, gpu):
            return f"{role} GPU {reason}"
    return None


def recommended(splits: Sequence[Split], gpu: Gpu) -> Split | None:
    """The fastest that fits."""
    fitting = [split for split in splits if split_misfit(split, gpu) is None]
    return max(fitting, key=lambda split: split.tokens_per_s, default=None)


def check_plan_args(args: argparse.Namespace) -> None:
    """Refuse what the figures do not cover."""
    if args.dtype == "float32":
        raise UsageError("--plan: counts with the GPUs' bf16 rates; leave --dtype float32 out")
