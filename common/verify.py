"""Is this folder what serving engines load? Every check by name, every fault with cause and cure.

Reads config.json and model.safetensors alone, in z-lab's layout or that of speculators. A fault is
what an engine refuses, or reads as another drafter. A warning is what engines accept all the same,
as in drafters published earlier; an export of ours must be without any.

What the engines do (vLLM's qwen3_dflash.py, SGLang's models/dflash.py, z-lab's class): vLLM puts
"model." before every name and raises for unknown ones; SGLang skips unknown names and leaves
missing ones as they were, without a word; transformers before 5 reads rope_theta, 5 rope_parameters
too, and a base that it does not find becomes its default.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from common.drafter import Drafter
from common.drafter_config import (
    ARCHITECTURES,
    CONFIG_FILE,
    WEIGHTS_FILE,
    DrafterConfig,
    draft_kind,
)
from common.reference import (
    reference_scores,
    reference_states,
    seeded_sample,
    seeded_words,
    training_states,
)
from common.run import UserError, print_table
from common.speculators import ENDS, EXTRA_TENSORS, is_speculators, zlab_json

PREFIXES = ("model.", "module.", "draft_model.", "_orig_mod.")  # of wrappers around the drafter
TINY = 1e-12  # a fresh selector scores 0
CLOSENESS = 1e-2  # of the largest state; measured: 1.4e-5 at the shape of Qwen3.6-27B's
FLOAT_TYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}  # safetensors' names


class Finding(NamedTuple):
    """What is wrong and what to do; `fatal` when engines do not load it as it was trained."""

    fatal: bool
    text: str


@dataclass(frozen=True)
class Check:
    """One row of the table."""

    name: str
    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> str:
        if any(finding.fatal for finding in self.findings):
            return "FAULT"
        return "warning" if self.findings else "ok"


@dataclass(frozen=True)
class Parts:
    """A folder that could be read: config.json as it stands and in z-lab's words, the open file."""

    folder: Path
    config: Mapping[str, Any]
    zlab: Mapping[str, Any]
    shape: DrafterConfig
    file: Any

    def facts(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape and dtype of a tensor, from the file's header."""
        part = self.file.get_slice(name)
        return tuple(part.get_shape()), part.get_dtype()


def fault(text: str) -> Finding:
    """A finding for which engines do not load the drafter, or compute another."""
    return Finding(True, text)


def warning(text: str) -> Finding:
    """A finding that engines get along with."""
    return Finding(False, text)


def verify(folder: Path) -> list[Check]:
    """All checks of a folder; those that need what cannot be read are left out."""
    with contextlib.ExitStack() as opened:
        checks: list[Check] = []
        try:
            config = read_config(folder)
            checks += config_checks(config)
            file = opened.enter_context(_open_weights(folder / WEIGHTS_FILE))
        except UserError as error:
            return [*checks, Check("files", (fault(str(error)),))]
        try:
            zlab = zlab_json(config, num_target_layers=_least_depth(config))
            parts = Parts(folder, config, zlab, DrafterConfig.from_json(zlab), file)
        except UserError:
            return checks  # config_checks has said so
        for name, look in TENSOR_CHECKS:
            checks.append(Check(name, tuple(look(parts))))
        if not any(check.verdict == "FAULT" for check in checks):
            checks.append(Check("forward", tuple(check_forward(parts))))
        return checks


def config_checks(config: Mapping[str, Any]) -> list[Check]:
    """The checks of a config.json in either layout."""
    try:
        zlab = zlab_json(config, num_target_layers=_least_depth(config))
        DrafterConfig.from_json(zlab)
    except UserError as error:
        return [Check("drafter", (fault(str(error).removeprefix("drafter config: ")),))]
    looks: list[tuple[str, Callable[[Mapping[str, Any]], Iterator[Finding]], Mapping[str, Any]]] = [
        ("speculators keys", check_speculators_keys, config)
        if is_speculators(config)
        else ("z-lab keys", check_zlab_keys, config),
        ("dtype keys", check_dtype_keys, zlab),
        ("rope", check_rope, zlab),
        ("layer types", check_layer_types, zlab),
        ("mask token", check_mask_token, zlab),
    ]
    checks = [Check("drafter", ())]
    for name, look, keys in looks:
        try:
            checks.append(Check(name, tuple(look(keys))))
        except (TypeError, AttributeError) as error:
            checks.append(Check(name, (fault(f"a value of the wrong type ({error})"),)))
    return checks


def print_checks(folder: Path, checks: list[Check]) -> int:
    """Print the table, then a line for each finding; the exit code."""
    rows = [(check.name, check.verdict) for check in checks]
    findings = [(check.name, finding) for check in checks for finding in check.findings]
    faults = sum(finding.fatal for _, finding in findings)
    verdict = f"{faults} fault{'s' * (faults > 1)}" if faults else "engines load it"
    print_table(f"Export {folder}", [*rows, ("all in all", verdict)])
    for name, finding in findings:
        print(f"{'FAULT' if finding.fatal else 'warning'}: {name}: {finding.text}")
    return 1 if faults else 0


# ---- files


def read_config(folder: Path) -> dict[str, Any]:
    """A drafter's config.json. Raises UserError when there is none."""
    path = folder / CONFIG_FILE
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}): name a drafter's folder") from None
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): export or download it again") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} is damaged (no JSON object): export or download it again")
    return config


@contextlib.contextmanager
def _open_weights(path: Path) -> Iterator[Any]:
    try:
        file = safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        reason = "is missing" if not path.exists() else f"is damaged or cut short ({error})"
        raise UserError(f"{path} {reason}: export or download it again") from None
    with file as opened:
        yield opened


def _least_depth(config: Mapping[str, Any]) -> int:
    """How deep a target must be, for speculators folders that do not say how deep it is."""
    ids = config.get("aux_hidden_state_layer_ids")
    ids = ids if isinstance(ids, list) else []
    return max((layer for layer in ids if isinstance(layer, int)), default=0) + 1


# ---- config.json


def check_zlab_keys(config: Mapping[str, Any]) -> Iterator[Finding]:
    """The keys by which engines know a drafter of z-lab's layout."""
    dflash = config.get("dflash_config") or {}
    if absent := {"mask_token_id", "target_layer_ids"} - dflash.keys():
        yield fault(f"dflash_config lacks {', '.join(sorted(absent))}, which engines read there")
    if not set(ARCHITECTURES.values()) & set(config.get("architectures") or ()):
        named = ARCHITECTURES["dflash"]
        yield fault(f'architectures lacks "{named}", by which engines find the class')
    if config.get("model_type") != "qwen3":
        yield fault(
            f'model_type is {config.get("model_type")}: must be "qwen3", the drafter\'s own'
        )
    if "auto_map" in config:
        yield warning("auto_map names remote code, which needs a dflash.py beside it; remove it")
    sizes = {"the top level": config.get("block_size"), "dflash_config": dflash.get("block_size")}
    if None in sizes.values():
        place = next(place for place, size in sizes.items() if size is None)
        yield warning(f"block_size is not in {place}: engines differ in where they read it")
    elif len(set(sizes.values())) > 1:
        yield fault(f"block_size is {sizes['the top level']} at the top, another in dflash_config")


def check_speculators_keys(config: Mapping[str, Any]) -> Iterator[Finding]:
    """The keys by which vLLM knows a drafter of speculators' layout."""
    inner, vocabulary = config["transformer_layer_config"], config.get("draft_vocab_size")
    if inner.get("model_type") != "qwen3":
        yield fault(f'transformer_layer_config: model_type {inner.get("model_type")}, not "qwen3"')
    if not isinstance(vocabulary, int) or not 0 < vocabulary <= inner["vocab_size"]:
        yield fault(f"draft_vocab_size is {vocabulary}: must be vocab_size, or less with a d2t map")
    if "num_target_layers" not in inner:
        yield warning("the target's depth is not in it: its last layer cannot be told from others")
    try:
        facts = config["speculators_config"]
        method = facts["proposal_methods"][0]
        algorithm, drafts = facts["algorithm"], method["speculative_tokens"]
        target = facts["verifier"]["name_or_path"]
    except (KeyError, IndexError, TypeError):
        yield fault(
            "speculators_config lacks algorithm, proposal_methods[0].speculative_tokens or "
            "verifier.name_or_path, which vLLM reads: export it again"
        )
        return
    if algorithm != "dflash" or method.get("proposal_type") != "greedy":
        yield fault(f"speculators_config: {algorithm}, {method.get('proposal_type')}: not dflash")
    if drafts != config["block_size"] - 1:
        yield fault(f"speculative_tokens is {drafts}: must be block_size - 1, the anchor is given")
    if not target:
        yield fault("verifier.name_or_path is empty: name the target, vLLM serves that one")


def check_dtype_keys(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Both spellings of the weights' type."""
    dtypes = [config.get(key) for key in ("dtype", "torch_dtype")]
    if dtypes == [None, None]:
        yield fault("neither dtype nor torch_dtype: add both, engines would load in float32")
    elif None in dtypes:
        yield warning(
            "dtype or torch_dtype alone: transformers 4 reads torch_dtype, 5 writes dtype"
        )
    elif dtypes[0] != dtypes[1]:
        yield fault(f"dtype is {dtypes[0]}, torch_dtype {dtypes[1]}: must be the same")


def check_rope(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Both places of the rotary base."""
    top, inner = config.get("rope_theta"), (config.get("rope_parameters") or {}).get("rope_theta")
    if inner is None:
        yield warning("the rotary base stands in rope_theta alone: add rope_parameters")
    elif top is None:
        yield warning(
            "the rotary base stands in rope_parameters alone, and transformers 4 reads 10,000 "
            "then: add rope_theta"
        )
    elif top != inner:
        yield fault(f"rope_theta is {top} at the top, {inner} in rope_parameters: must be the same")


def check_layer_types(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Layer types, and the window that they need."""
    sliding = "sliding_attention" in (config.get("layer_types") or ())
    if not config.get("layer_types"):
        yield warning("layer_types is missing: all layers are taken as full attention; name them")
    if sliding and not config.get("use_sliding_window"):
        said = "is missing" if config.get("use_sliding_window") is None else "is false"
        yield fault(f"use_sliding_window {said}, so transformers drops the window: set it to true")
    if not sliding and config.get("use_sliding_window"):
        yield warning("use_sliding_window is true, and no layer slides: set it to false")
    if "is_causal" in config and draft_kind(config) == "dflash":
        yield warning("is_causal overrides what each layer's type says: remove it")


def check_mask_token(config: Mapping[str, Any]) -> Iterator[Finding]:
    """The mask token is none that texts hold."""
    mask = {**config, **(config.get("dflash_config") or {})}["mask_token_id"]
    for key in ("eos_token_id", "pad_token_id", "bos_token_id"):
        if config.get(key) == mask:
            yield warning(f"mask_token_id {mask} is {key} too: it must not occur in text")


# ---- model.safetensors


def expected_shapes(shape: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """By name, the tensors of a drafter of that config."""
    with torch.device("meta"):
        drafter = Drafter(shape)
    return {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}


def allowed_extras(parts: Parts) -> frozenset[str]:
    """Tensors that a layout has beside the drafter's own."""
    return EXTRA_TENSORS if is_speculators(parts.config) else frozenset()


def check_names(parts: Parts) -> Iterator[Finding]:
    """The names of the tensors are the drafter's own, all of them, bare."""
    own, have = set(expected_shapes(parts.shape)), set(parts.file.keys())
    for prefix in PREFIXES:
        if stray := sorted(name for name in have if name.startswith(prefix)):
            yield fault(
                f'{len(stray)} names begin with "{prefix}" ({stray[0]}): SGLang skips such '
                "tensors in silence, vLLM refuses them; save them without it"
            )
            have -= set(stray)
            own -= {name.removeprefix(prefix) for name in stray}
    for what, names in (
        ("missing", own - have),
        ("unknown", have - own - allowed_extras(parts)),
    ):
        if names:
            listed = ", ".join(sorted(names)[:4]) + (", ..." if len(names) > 4 else "")
            yield fault(f"{what}: {listed}: export it again, the names are z-lab's")
    if is_speculators(parts.config):
        if absent := [name for name in ENDS if name not in have]:
            yield warning(f"{' and '.join(absent)} not in it: engines take the target's own")
        reduced = parts.config.get("draft_vocab_size") != parts.shape.vocab_size
        if reduced and not {"d2t", "lm_head.weight"} <= have:
            yield fault("a reduced vocabulary needs d2t and a lm_head.weight of its own")
        if reduced and "d2t" in have:
            yield from check_draft_words(parts)


def check_draft_words(parts: Parts) -> Iterator[Finding]:
    """d2t: for each word of the draft's vocabulary, how far behind its own id the target's is."""
    offsets, size = parts.file.get_tensor("d2t"), parts.config.get("draft_vocab_size")
    if tuple(offsets.shape) != (size,):
        yield fault(f"d2t is {tuple(offsets.shape)}, not ({size},) as draft_vocab_size says")
        return
    words = torch.arange(len(offsets)) + offsets
    if not ((words >= 0) & (words < parts.shape.vocab_size)).all():
        yield fault(f"d2t names words outside of the target's {parts.shape.vocab_size}")


def check_shapes(parts: Parts) -> Iterator[Finding]:
    """The tensors' shapes are those that config.json gives."""
    wanted = expected_shapes(parts.shape)
    if is_speculators(parts.config):
        reduced = parts.config.get("draft_vocab_size")
        rows = (parts.shape.vocab_size, reduced if isinstance(reduced, int) else 0)
        wanted |= {name: (n, parts.shape.hidden_size) for name, n in zip(ENDS, rows, strict=True)}
    for name in sorted(wanted.keys() & set(parts.file.keys())):
        shape, _ = parts.facts(name)
        if shape != wanted[name]:
            yield fault(f"{name} is {shape}, not {wanted[name]} as config.json says")


def check_dtypes(parts: Parts) -> Iterator[Finding]:
    """The tensors' types are the one that config.json says."""
    said = parts.zlab.get("dtype") or parts.zlab.get("torch_dtype")
    found: dict[str, str] = {}
    for name in sorted(set(parts.file.keys()) - {"t2d", "d2t"}):
        found.setdefault(parts.facts(name)[1], name)
    for dtype, name in found.items():
        if FLOAT_TYPES.get(dtype) != said:
            yield fault(f"{name} is {dtype}, config.json says {said}: save all tensors as {said}")
    if found and found.keys() <= FLOAT_TYPES.keys() - {"BF16"}:
        yield warning(f"not bfloat16 but {', '.join(found)}: it is served rounded once more")


def check_metadata(parts: Parts) -> Iterator[Finding]:
    """What transformers wants to read in the file's header."""
    metadata = parts.file.metadata() or {}
    if metadata.get("format") != "pt":
        yield fault(f'the file\'s metadata is {metadata}: transformers wants {{"format": "pt"}}')


def check_finite(parts: Parts) -> Iterator[Finding]:
    """No tensor holds inf or NaN."""
    for name in sorted(parts.file.keys()):
        if parts.facts(name)[1] not in FLOAT_TYPES:  # another fault, or whole numbers
            continue
        tensor = parts.file.get_tensor(name)
        if not tensor.isfinite().all():
            count = int((~tensor.isfinite()).sum())
            yield fault(f"{name}: {count} values are not finite: export an earlier checkpoint")


def check_forward(parts: Parts) -> Iterator[Finding]:
    """The drafter built from the files, in training's form, against the formulas in float32."""
    sample, drafter = seeded_sample(parts.shape), read_drafter(parts.folder)
    states = reference_states(parts.file.get_tensor, parts.shape, sample)
    if not states.any():
        yield fault("its states are 0 whatever it reads: export an earlier checkpoint")
    compared = {"forward": (training_states(drafter, sample), states)}
    if drafter.candidate_selector is not None:
        words = seeded_words(parts.shape)
        scores = reference_scores(parts.file.get_tensor, states[0, 0], words)
        with torch.no_grad():
            got = drafter.candidate_selector(states[0, 0], words, words)
        compared["selector"] = (got, scores)
    for what, (got, want) in compared.items():
        off = float((got - want).abs().max() / want.abs().max().clamp(min=TINY))
        if not off < CLOSENESS:
            yield fault(
                f"the training {what} is {off:.2g} off the formulas on a seeded input: a fault of "
                "this program, or weights that overflow float32"
            )


def read_shape(folder: Path) -> DrafterConfig:
    """The shape that a folder's config.json gives, in either layout."""
    config = read_config(folder)
    return DrafterConfig.from_json(zlab_json(config, num_target_layers=_least_depth(config)))


def read_drafter(folder: Path) -> Drafter:
    """The drafter of a folder, from its files alone, in float32 on the CPU."""
    shape = read_shape(folder)
    with _open_weights(folder / WEIGHTS_FILE) as file:
        weights = {name: file.get_tensor(name).float() for name in expected_shapes(shape)}
    with torch.device("meta"):
        drafter = Drafter(shape)
    drafter.load_state_dict(weights, assign=True)  # no copies
    return drafter


TENSOR_CHECKS: tuple[tuple[str, Callable[[Parts], Iterator[Finding]]], ...] = (
    ("tensor names", check_names),
    ("shapes", check_shapes),
    ("dtypes", check_dtypes),
    ("metadata", check_metadata),
    ("finite weights", check_finite),
)
