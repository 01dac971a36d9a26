"""What a training run stands on: data, hidden states, the drafter's shape; all checked together."""

import argparse
import contextlib
import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from common import dist, run
from common.batches import PACK_MULTIPLE
from common.cache import file_sha256
from common.checkpoint import Checkpoints
from common.client import ServedHiddenStates
from common.drafter import Drafter
from common.drafter_config import CONFIG_FILE, HEAD_DIM, WEIGHTS_FILE, DrafterConfig
from common.drafting import TargetEnds
from common.lifetime import StopRequest, Waiting
from common.losses import needs_teacher
from common.mirror import Mirror
from common.plan import Plan
from common.s3 import abort_left_uploads
from common.shards import TokenizedDataset
from common.speculators import EXTRA_TENSORS, zlab_json
from common.store import Store, open_store
from common.stored import StoredHiddenStates
from common.target import Target
from common.target_files import (
    check_layers,
    default_target_layers,
    embedding_fingerprint,
    read_embedding_and_head,
    target_facts,
)
from common.wire import (
    ColocatedHiddenStates,
    HiddenStates,
    read_certificates,
    read_secret,
)

ADAM_BETAS = (0.9, 0.95)
SHARD_POLL_S = 1.0
DEFAULT_SHAPES = {  # z-lab's, by --draft
    "dflash": {"draft_layers": 5, "block_size": 16, "sliding_window": 2048},
    "dflash2": {"draft_layers": 5, "block_size": 8, "sliding_window": 2048},
}
ADDRESS = r"(grpc(\+tls|\+tcp)?://)?[^/,]+:\d+"


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
    counted_tokens: int | None  # of the rows whose hidden states are in files
    settings: dict[str, Any]

    @property
    def is_colocated(self) -> bool:
        return isinstance(self.hidden_states, ColocatedHiddenStates)


def open_dataset(args: argparse.Namespace, log: Any, stop: StopRequest) -> TokenizedDataset:
    """Wait for the plan and shard 0; refuse data without a mask token."""
    dataset = TokenizedDataset(
        args.data,
        cache_dir=args.cache_dir,
        cache_bytes=int(args.cache_gb * 1e9),
        endpoint_url=args.endpoint_url,
    )
    waiting, timeout_s = Waiting(log, stop), args.shard_timeout
    hint = f"is stage 1 running, and is --data {args.data} its --output?"
    on_wait = waiting.for_("plan.json", timeout_s=timeout_s, hint=hint)
    plan = dataset.wait_for_plan(timeout_s=timeout_s, poll_s=SHARD_POLL_S, on_wait=on_wait)
    if plan.settings["mask_token_id"] is None:
        raise run.UserError(
            f"{args.data} was tokenized with --mask-token none, but a drafter needs a mask token"
        )
    on_wait = waiting.for_("shard 0", timeout_s=timeout_s)
    dataset.wait_for_shard(0, timeout_s=timeout_s, poll_s=SHARD_POLL_S, on_wait=on_wait)
    return dataset


def _round_up(length: int) -> int:
    return -(-length // PACK_MULTIPLE) * PACK_MULTIPLE


def open_hidden_states(
    args: argparse.Namespace, device: torch.device, log: Any, stop: StopRequest
) -> HiddenStates:
    """Connect to the servers, open the files, or load the target beside the drafter."""
    if args.hidden_states == "colocated":
        target = Target.load(
            args.target,
            layers=args.layers,
            dtype=getattr(torch, args.dtype),
            device=device,
            final=args.eval_only or needs_teacher(args.loss),
        )
        if device.type == "cuda":
            warn_of_slow_kernels(target, log)
        return ColocatedHiddenStates(target, max_tokens_per_request=args.pack_length)
    if not re.fullmatch(f"{ADDRESS}(,{ADDRESS})*,?", args.hidden_states):
        return StoredHiddenStates(
            args.hidden_states, cache_dir=args.cache_dir, endpoint_url=args.endpoint_url
        )
    return ServedHiddenStates(
        args.hidden_states.rstrip(",").split(","),
        token=read_secret(args.token_file),
        tls_root_certs=read_certificates(args.tls_root_certs),
        connect_timeout_s=args.server_timeout,
        tokens_per_request=args.pack_length,
        on_wait=Waiting(log, stop).for_(
            f"server {args.hidden_states}",
            timeout_s=args.server_timeout,
            hint="is extract_hidden_online.py running there, and done with loading?",
        ),
    )


def warn_of_slow_kernels(target: Target, log: Any) -> None:
    """A hybrid target runs without its kernels' packages too, several times slower."""
    if slow := [name for name, there in target.fast_kernels().items() if not there]:
        log.warning(
            f"target={target.name} runs linear attention in the slow reference: install "
            f"{' and '.join(slow)}"
        )


def check_flex(config: DrafterConfig, capability: tuple[int, int]) -> None:
    """Raise UserError for heads whose backward in flex_attention this kind of GPU has no room for.

    sm_12x (RTX PRO 6000, RTX 50xx) has 101 KB of shared memory for a block, and heads above 128
    need 114 (pytorch/pytorch#198224).
    """
    if capability[0] == 12 and config.head_dim > HEAD_DIM:
        raise run.UserError(
            f"--draft-config: heads of {config.head_dim} are too large for --attention flex on "
            f"this GPU (sm_{capability[0]}{capability[1]}): {HEAD_DIM} at most, or --attention sdpa"
        )


def read_draft_config(path: Path, flag: str, *, num_target_layers: int) -> DrafterConfig:
    """A config.json in z-lab's layout or that of speculators."""
    try:
        config = json.loads(path.read_bytes())
        return DrafterConfig.from_json(zlab_json(config, num_target_layers=num_target_layers))
    except (OSError, ValueError) as error:
        raise run.UserError(f"{flag}: cannot read {path} ({error})") from error


def given_config(args: argparse.Namespace) -> tuple[str, DrafterConfig] | None:
    """The drafter's shape where a file says it, --draft-config or --init-from, and which."""
    if args.draft_config is not None:
        flag, path = f"--draft-config {args.draft_config}", args.draft_config
    elif args.init_from is not None:
        flag, path = f"--init-from {args.init_from}", args.init_from / CONFIG_FILE
    else:
        return None
    depth = target_facts(args.target).num_layers
    return flag, read_draft_config(path, flag, num_target_layers=depth)


def settle_layers(
    args: argparse.Namespace, given: tuple[str, DrafterConfig] | None
) -> tuple[int, ...]:
    """The tapped layers: --layers, else those of a given config, else evenly spread ones."""
    if args.layers is not None:
        check_layers(args.layers, target_facts(args.target).num_layers)
        return args.layers
    if given is not None:
        return given[1].target_layer_ids
    return default_target_layers(target_facts(args.target).num_layers)


def drafter_config(
    args: argparse.Namespace, given: tuple[str, DrafterConfig] | None, *, mask_token_id: int
) -> DrafterConfig:
    """The drafter's shape: from a given config, or from the target's and the flags."""
    facts = target_facts(args.target)
    if given is not None:
        flag, config = given
        expected = {
            "hidden_size": (config.hidden_size, facts.hidden_size),
            "vocab_size": (config.vocab_size, facts.vocab_size),
            "num_target_layers": (config.num_target_layers, facts.num_layers),
            "target_layer_ids": (config.target_layer_ids, tuple(args.layers)),
            "mask_token_id": (config.mask_token_id, mask_token_id),
        }
        shape = {
            "draft": config.draft,
            "draft_layers": config.num_hidden_layers,
            "block_size": config.block_size,
            "sliding_window": config.sliding_window or 0,
        }
        for name, value in shape.items():
            if getattr(args, name) is not None:
                expected[name] = (value, getattr(args, name))
        differing = [
            f"{name} is {got}, not {want}" for name, (got, want) in expected.items() if got != want
        ]
        if differing:
            raise run.UserError(
                f"{flag}: made for another target, data or flags: {'; '.join(differing)}"
            )
        vars(args).update(shape)
        return config
    args.draft = args.draft or "dflash"
    for name, value in DEFAULT_SHAPES[args.draft].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
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
        draft=args.draft,
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
                "give both scripts the same --target and --layers"
            )
    if needs_teacher(args.loss) and not have.final:
        raise run.UserError(
            f"--loss {args.loss} learns from the target's last hidden states, which "
            f"--hidden-states {args.hidden_states} does not have: start extract_hidden_online.py "
            "again, with --final"
        )
    if isinstance(hidden_states, StoredHiddenStates) and hidden_states.data_sha256 != plan.sha256:
        raise run.UserError(
            f"--hidden-states {args.hidden_states} were written for other data than {args.data}: "
            "run extract_hidden_online.py --data with it, to another --output"
        )
    longest = plan.settings["max_length"]
    if longest > args.pack_length and isinstance(hidden_states, StoredHiddenStates):
        raise run.UserError(
            f"--pack-length {args.pack_length}: cuts rows of {args.data} (tokenized with "
            f"--max-length {longest}), and {args.hidden_states} holds whole ones; give "
            f"--pack-length {_round_up(longest)} or more"
        )
    tokenizer = Path(args.target) / "tokenizer.json"
    if tokenizer.exists() and file_sha256(tokenizer) != plan.tokenizer_sha256:
        raise run.UserError(
            f"{args.data} was tokenized with another tokenizer.json than the one in {args.target}: "
            "run tokenize_completions.py with --tokenizer and that folder"
        )
    if plan.settings["vocab_size"] > facts.vocab_size:
        raise run.UserError(
            f"{args.data} uses ids up to {plan.settings['vocab_size'] - 1}, "
            f"but {args.target} has {facts.vocab_size}: it was tokenized for another target"
        )


def run_settings(
    args: argparse.Namespace,
    hidden_states: HiddenStates,
    config: DrafterConfig,
    plan: Plan,
    *,
    free_flags: Collection[str],
) -> dict[str, Any]:
    """What decides the weights: compared on a resume, kept in every checkpoint."""
    chosen = {key: value for key, value in vars(args).items() if key not in free_flags}
    chosen["draft_config"] = config.to_json()
    chosen["plan_sha256"] = plan.sha256
    if isinstance(hidden_states, StoredHiddenStates):
        chosen["first_rows"] = hidden_states.num_rows
    if args.init_from is not None:
        try:
            chosen["init_from"] = file_sha256(args.init_from / WEIGHTS_FILE)
        except OSError as error:
            raise run.UserError(f"--init-from {args.init_from}: no {WEIGHTS_FILE} in it") from error
    chosen["weights_fingerprint"] = hidden_states.description.weights_fingerprint
    chosen["embedding_sha256"] = hidden_states.description.embedding_sha256
    return json.loads(run.json_bytes(chosen))


def load_weights(drafter: nn.Module, folder: Path) -> None:
    """Take the weights of a published drafter. Raises UserError that lists what differs.

    An embedding or a head in it is left there: the target's own are used.
    """
    try:
        tensors = load_file(folder / WEIGHTS_FILE)
    except (OSError, SafetensorError) as error:
        raise run.UserError(f"--init-from {folder}: {WEIGHTS_FILE}: {error}") from error
    tensors = {name: tensor for name, tensor in tensors.items() if name not in EXTRA_TENSORS}
    own = drafter.state_dict()
    differing = [f"{name} is missing" for name in sorted(own.keys() - tensors.keys())]
    differing += [f"{name} is unknown" for name in sorted(tensors.keys() - own.keys())]
    differing += [
        f"{name} is {tuple(tensors[name].shape)}, not {tuple(own[name].shape)}"
        for name in sorted(own.keys() & tensors.keys())
        if own[name].shape != tensors[name].shape
    ]
    if differing:
        more = f"; and {len(differing) - 6} more" if len(differing) > 6 else ""
        raise run.UserError(f"--init-from {folder}: {'; '.join(differing[:6])}{more}")
    drafter.load_state_dict(tensors)


def build_drafter(
    config: DrafterConfig, args: argparse.Namespace, world: dist.World
) -> tuple[Drafter, torch.optim.Optimizer]:
    """The drafter with fresh float32 weights, sharded over all ranks, and its AdamW."""
    drafter = Drafter(config, checkpoint_layers=args.checkpoint_layers)
    drafter.reset_parameters(seed=args.seed)
    if args.init_from is not None:
        load_weights(drafter, args.init_from)
    drafter.to(world.device)
    if args.compile:
        drafter.compile_layers()
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, args.dtype),
        reduce_dtype=torch.float32,
        # all inputs have the compute dtype already, but the rotary tables, which are float32
        cast_forward_inputs=False,
    )
    for module in drafter.shards:
        sharded = fully_shard(module, mesh=world.mesh, mp_policy=policy)
        sharded.set_gradient_divide_factor(1.0)  # gradients add up over ranks, as the loss does
        sharded.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.AdamW(
        drafter.parameters(),
        lr=args.learning_rate,
        betas=ADAM_BETAS,
        weight_decay=0.0,
        fused=world.device.type == "cuda",
    )
    return drafter, optimizer


def prepare(
    args: argparse.Namespace,
    world: dist.World,
    log: Any,
    stop: StopRequest,
    closing: contextlib.ExitStack,
    *,
    free_flags: Collection[str],
    given: tuple[str, DrafterConfig] | None,
) -> Setup:
    """Open the data and the hidden states, check that they belong together, settle the shape.

    `free_flags` are those that a resumed run may change; `given` is the drafter's shape where
    something says it, and the flag that names it.
    """
    if args.global_batch % (world.size * args.micro_batch):
        raise run.UsageError(
            f"--global-batch {args.global_batch}: must be a multiple of {world.size} ranks x "
            f"--micro-batch {args.micro_batch}"
        )
    args.layers = settle_layers(args, given)
    dataset = open_dataset(args, log, stop)
    config = drafter_config(args, given, mask_token_id=dataset.plan.settings["mask_token_id"])
    if args.attention == "flex":
        check_flex(config, torch.cuda.get_device_capability(world.device))
    hidden_states = open_hidden_states(args, world.device, log, stop)
    closing.callback(hidden_states.close)
    check_parts(args, hidden_states, dataset.plan)
    counted_tokens = None
    if isinstance(hidden_states, StoredHiddenStates):
        counted_tokens = dataset.keep_first(hidden_states.num_rows, timeout_s=args.shard_timeout)
    if isinstance(hidden_states, ColocatedHiddenStates):
        target = hidden_states.target
        ends = TargetEnds(target.embedding, target.head)
    else:
        dtype = getattr(torch, args.dtype)
        ends = TargetEnds(*read_embedding_and_head(args.target, dtype=dtype, device=world.device))
    if embedding_fingerprint(ends.embedding) != hidden_states.description.embedding_sha256:
        raise run.UserError(
            f"--hidden-states {args.hidden_states}: made by a target with other weights than "
            f"--target {args.target}: start the server with that one"
        )
    return Setup(
        args=args,
        world=world,
        dataset=dataset,
        hidden_states=hidden_states,
        ends=ends,
        config=config,
        num_anchors=int(args.anchor_ratio * args.pack_length),
        counted_tokens=counted_tokens,
        settings=run_settings(args, hidden_states, config, dataset.plan, free_flags=free_flags),
    )


def open_mirror(args: argparse.Namespace) -> Store | None:
    """Where --checkpoint-uri copies checkpoints to, writable; None without it."""
    if args.checkpoint_uri is None:
        return None
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
    return store


def open_checkpoints(
    args: argparse.Namespace, store: Store | None, world: dist.World, log: Any
) -> Checkpoints:
    """The run folder's checkpoints, and their mirror in a store."""
    folder, mirror = args.output / "checkpoints", None
    if store is not None:
        mirror = Mirror(store, folder, keep=args.keep, keep_every=args.keep_every, log=log)
    return Checkpoints(
        folder, world=world, keep=args.keep, keep_every=args.keep_every, mirror=mirror, log=log
    )
