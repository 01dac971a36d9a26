"""The scripts for a GPU's first hour, tried on a CPU at tiny size: they run, count and report."""

import json
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from common import dist
from common.run import UserError
from common.setup import check_flex, warn_of_slow_kernels
from common.target import Target
from tests.gpu import __main__ as checks
from tests.gpu import bench_step, bench_target
from tests.gpu.report import Report
from tests.tiny_models import tiny_target

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests.gpu itself runs here")


def read(path):
    found = json.loads(path.read_text())
    return dict(found["rows"]), found["figures"], found["failed"]


def test_a_step_is_counted_as_torch_and_the_planner_count_it(tmp_path, capsys):
    with dist.start("cpu") as world:
        parts = bench_step.make_parts(bench_step.TINY, world)
        ready = bench_step.ready_step(parts, [128, 128])
        work = bench_step.counted_work(parts, bench_step.batches_of(parts, ready, 0)[0])
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            bench_step.take_step(parts, ready, 0)
        report = bench_step.bench(world, bench_step.TINY, rounds=1, output=tmp_path / "out.json")
    flops = Counter({str(op): n for op, n in counter.get_flop_counts()["Global"].items()})
    matrices = work.total - work.forward["attention"] - work.backward["attention"]
    assert flops["aten.mm"] == matrices
    planned = bench_step.planned_work(bench_step.TINY)
    assert work.total == pytest.approx(planned.total, rel=0.02)
    assert report.finish(tmp_path / "out.json") == 0
    rows, figures, failed = read(tmp_path / "out.json")
    assert rows.keys() == {
        "drafter", "pack", "bf16 products", "masks",
        "plain: step", "plain: work", "plain: rate", "plain: recompiles",
    }  # fmt: skip
    assert figures["plain_tflop"] == pytest.approx(work.total / 1e12, rel=0.02)
    assert figures["plain_recompiles"] == 0 and figures["plain_step_s"] > 0 and not failed
    assert "plain: rate" in capsys.readouterr().out


def test_visible_pairs_are_those_of_the_masks():
    """Blocks in documents half as long see less context; nothing else is less for them."""
    with dist.start("cpu") as world:
        parts = bench_step.make_parts(bench_step.TINY, world)
        one, two = (bench_step.ready_step(parts, lengths) for lengths in ([256], [128, 128]))
        works = [
            bench_step.counted_work(parts, bench_step.batches_of(parts, ready, 0)[0])
            for ready in (one, two)
        ]
    assert works[0].forward["attention"] > 1.2 * works[1].forward["attention"]
    assert works[0].forward["blocks"] == works[1].forward["blocks"]


def test_a_card_without_room_measures_fewer_layers():
    need = bench_step.planned_bytes(bench_step.TRUE, "cuda")
    assert 40e9 < need < 90e9  # one card of 96 GB has room for it
    reserved = bench_step.RESERVED_BYTES
    assert bench_step.fitting(bench_step.TRUE, need + reserved, "cuda") == bench_step.TRUE
    assert 0 < bench_step.fitting(bench_step.TRUE, 32e9, "cuda").layers < 5
    assert bench_step.fitting(bench_step.TRUE, 8e9, "cuda") is None


def test_the_targets_benchmark_extrapolates(tmp_path):
    flags = ["--layers", "4", "--documents", "1", "--length", "64", "--rounds", "1"]
    assert bench_target.main([*flags, "--output", str(tmp_path / "out.json")]) == 0
    rows, figures, failed = read(tmp_path / "out.json")
    assert {"kernels", "rate", "27B, 4,096 tokens", "cost of the taps"} <= rows.keys()
    assert not failed and "slow reference" in rows["kernels"]
    # 193 TFLOP: 47.2 GFLOP a token, and documents of 64 tokens see little
    assert figures["whole_s"] * figures["tflops"] == pytest.approx(4096 * 0.0475, rel=0.02)


def python(code):
    return (sys.executable, "-c", code)


def run_part(tmp_path, part):
    return checks.run_part(part, tmp_path / f"{part.name}.out", limit_s=part.limit_s)


def test_a_part_that_fails_or_hangs_stops_no_other(tmp_path, capfd):
    found = Report("step", rows=[("masks", "2 ms")], figures={"tokens": 4096}, failed=["no"])
    write = f"import sys, time; open(sys.argv[1], 'w').write('''{json.dumps(vars(found))}''')"
    hangs = run_part(tmp_path, checks.Part("step", python(f"{write}; time.sleep(60)"), 1.0))
    fails = run_part(tmp_path, checks.Part("target", python("raise SystemExit('boom')"), 30.0))
    assert hangs.failed == "not done after 1 s" and hangs.seconds < 20
    assert hangs.rows == [("masks", "2 ms"), ("FAILED", "no")] and hangs.facts == {"tokens": 4096}
    assert fails.failed == "exit code 1" and "boom" in capfd.readouterr().err
    title, rows = checks.table([hangs, fails])
    assert "torch" in title and "no GPU" in title
    assert [name for name, _ in rows] == ["STEP", "  masks", "  FAILED", "TARGET"]


def test_the_tests_become_rows(tmp_path):
    (tmp_path / "test_sample.py").write_text(
        "import pytest\n"
        "def test_good(record_property):\n    record_property('figure', 'off by 1e-5')\n"
        "def test_bad():\n    assert 1 == 2, 'too far'\n"
        "@pytest.mark.skip(reason='no card')\ndef test_absent():\n    pass\n"
    )
    plain = ("-q", "-c", "/dev/null", "-p", "tests.gpu.findings")
    command = (sys.executable, "-m", "pytest", *plain, str(tmp_path), "--findings")
    outcome = run_part(tmp_path, checks.Part("tests", command, 60.0))
    rows = dict(outcome.rows)
    assert outcome.failed == "exit code 1"
    assert rows["good"] == "passed in 0 s; off by 1e-5" and rows["absent"] == "left out: no card"
    assert rows["bad"].startswith("FAILED: AssertionError: too far")


def test_speed_is_of_target_and_drafter_in_turn():
    found = {
        "target": {"whole_s": 1.0, "planned_s": 0.8},
        "step": {
            "tokens": 4096,
            "plain_step_s": 1.5,
            "compiled_step_s": 1.0,
            "planned_step_s": 1.2,
        },
    }
    ((name, text),) = checks.speed_rows(found)
    assert name == "colocated, a card" and text == "2.05e+03 tokens/s; planner 2.05e+03"
    assert checks.speed_rows({"target": found["target"]}) == []


def test_heads_too_large_for_a_gpus_shared_memory_are_refused():
    config = bench_step.TINY.config()
    wide = replace(config, head_dim=256)
    check_flex(config, (12, 0))
    check_flex(wide, (9, 0))
    with pytest.raises(UserError, match=r"heads of 256 .*\(sm_120\): 128 at most"):
        check_flex(wide, (12, 0))


@pytest.mark.parametrize(("kind", "count"), [("qwen3_5", 1), ("qwen3", 0)])
def test_a_target_without_its_kernels_is_told_of(tmp_path, kind, count):
    path = str(tiny_target(tmp_path / kind, kind=kind))
    target = Target.load(path, layers=(1,), dtype=torch.float32, device=torch.device("cpu"))
    said = []
    warn_of_slow_kernels(target, SimpleNamespace(warning=said.append))
    assert len(said) == count
    if count:
        assert said[0].endswith("install flash-linear-attention and causal-conv1d")
