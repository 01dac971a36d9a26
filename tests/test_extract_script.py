"""extract_hidden_online.py as a person runs it: real processes, real sockets, real signals."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import extract_hidden_online
from common.client import ServedHiddenStates
from common.connection import describe
from common.run import UserError
from common.target import Target
from common.wire import ColocatedHiddenStates
from tests import forked
from tests.servers import free_port
from tests.tiny_models import tiny_target

ROOT = Path(__file__).parent.parent
SCRIPT = [sys.executable, str(ROOT / "extract_hidden_online.py")]
LAYERS = (0, 1, 2)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    return str(tiny_target(tmp_path_factory.mktemp("target") / "tiny"))


@contextlib.contextmanager
def running(*flags, stderr=None):
    """A server process; its addresses are lines of `process.stdout`."""
    process = forked.Popen(
        "extract_hidden_online", flags, env=os.environ, stdout=subprocess.PIPE, stderr=stderr
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def serving(target_folder, *flags, port=0, stderr=None):
    listen = ("--listen", f"127.0.0.1:{port}")
    return running("--target", target_folder, "--layers", "0,1,2", *listen, *flags, stderr=stderr)


def run_script(*flags):
    return forked.run_to_end("extract_hidden_online", flags, env=os.environ, timeout=120)


def requests(count=12):
    generator = np.random.default_rng(3)
    return [
        [
            generator.integers(0, 128, size=int(length)).astype(np.int32)
            for length in generator.integers(1, 60, size=4)
        ]
        for _ in range(count)
    ]


def colocated(target_folder):
    target = Target.load(
        target_folder, layers=LAYERS, dtype=torch.float32, device=torch.device("cpu"), final=True
    )
    return ColocatedHiddenStates(target, max_tokens_per_request=300)


@pytest.fixture(scope="module")
def address(target_folder):
    """A server that lives through this file, with the last states and a bound of 300 tokens."""
    with serving(target_folder, "--final", "--max-tokens-per-request", "300") as process:
        yield process.stdout.readline().strip()


def test_served_hidden_states_are_the_colocated_ones_to_the_bit(target_folder, address):
    own = colocated(target_folder)
    served = ServedHiddenStates([address], connect_timeout_s=60)
    assert served.description == own.description
    answers = [served.submit(request) for request in requests()]
    for request, answer in zip(requests(), answers, strict=True):
        got = answer.result(timeout=60).hidden
        assert got.dtype == torch.bfloat16
        assert torch.equal(got, own.submit(request).result().hidden)
    served.close()


def test_a_killed_server_loses_no_request(target_folder):
    own, work = colocated(target_folder), requests(60)
    with serving(target_folder) as one, serving(target_folder) as two:
        addresses = [process.stdout.readline().strip() for process in (one, two)]
        served = ServedHiddenStates(addresses, connect_timeout_s=60)
        answers = [served.submit(request) for request in work]
        answers[5].result(timeout=60)
        one.kill()
        for request, answer in zip(work, answers, strict=True):
            assert torch.equal(
                answer.result(timeout=60).hidden, own.submit(request).result().hidden
            )
        served.close()


def test_a_restarted_server_is_found_again(target_folder):
    own, work = colocated(target_folder), requests(2)
    with serving(target_folder) as process:
        address = process.stdout.readline().strip()
        served = ServedHiddenStates([address], connect_timeout_s=60)
        served.submit(work[0]).result(timeout=60)
    answer = served.submit(work[1])
    with serving(target_folder, port=int(address.split(":")[1])):
        got = answer.result(timeout=60).hidden
    assert torch.equal(got, own.submit(work[1]).result().hidden)
    served.close()


def test_requests_fail_with_the_address_when_every_server_stays_away(target_folder):
    with serving(target_folder) as process:
        served = ServedHiddenStates([process.stdout.readline().strip()], connect_timeout_s=2)
        served.submit(requests(1)[0]).result(timeout=60)
    with pytest.raises(UserError, match="no hidden-state server for 2 s.*127.0.0.1"):
        served.submit(requests(1)[0]).result(timeout=30)
    served.close()


def test_a_bad_request_gets_an_error_and_the_stream_lives_on(address):
    good = requests(1)[0]
    served = ServedHiddenStates([address], connect_timeout_s=60)
    for bad, message in [
        ([np.array([5, 128], np.int32)], "token id 128"),
        ([np.array([], np.int32), good[0]], "at least one token"),
        ([np.zeros(301, np.int32)], "--max-tokens-per-request"),
    ]:
        with pytest.raises(UserError, match=message):
            served.submit(bad).result(timeout=60)
        assert served.submit(good).result(timeout=60).hidden.shape[1] == 3 * 64
    served.close()


def test_final_states_come_when_asked_for_and_served(target_folder, address):
    served = ServedHiddenStates([address], connect_timeout_s=60)
    request = requests(1)[0]
    taps = served.submit(request, final=True).result(timeout=60)
    assert taps.final.shape == (sum(map(len, request)), 64)
    assert torch.equal(
        taps.final, colocated(target_folder).submit(request, final=True).result().final
    )
    assert served.submit(request).result(timeout=60).final is None
    served.close()


def test_a_token_is_asked_for_and_checked(target_folder, tmp_path):
    secret = tmp_path / "token"
    secret.write_text("open sesame\n")
    with serving(target_folder, "--token-file", str(secret)) as process:
        address = process.stdout.readline().strip()
        assert describe(address, token=b"open sesame").layers == LAYERS
        with pytest.raises(UserError, match="--token-file"):
            describe(address, token=b"wrong")
        with pytest.raises(UserError, match="--token-file"):
            describe(address)
        served = ServedHiddenStates([address], token=b"open sesame", connect_timeout_s=60)
        with pytest.raises(UserError, match="no final states"):
            served.submit(requests(1)[0], final=True).result(timeout=60)
        served.close()


def test_one_server_a_device(target_folder):
    with serving(target_folder, "--devices", "cpu,cpu") as process:
        addresses = {process.stdout.readline().strip() for _ in range(2)}
        assert len(addresses) == 2
        assert {describe(address).hidden_size for address in addresses} == {64}
        served = ServedHiddenStates(list(addresses), connect_timeout_s=60)
        for request in requests(8):
            served.submit(request).result(timeout=60)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 143
        served.close()
        for address in addresses:
            with pytest.raises(UserError):
                describe(address)


def test_ping_and_check(target_folder, address):
    found = run_script("--ping", address)
    assert found.returncode == 0
    facts = json.loads(found.stdout)
    assert facts["layers"] == [0, 1, 2] and facts["stats"]["up_s"] > 0
    dead = f"127.0.0.1:{free_port()}"
    lost = run_script("--ping", dead)
    assert lost.returncode == 1 and dead in lost.stderr and len(lost.stderr.splitlines()) == 1
    checked = run_script(
        "--target", target_folder, "--layers", "0,1,2", "--check", "--devices", "cpu,cpu"
    )
    assert checked.returncode == 0
    lines = checked.stdout.splitlines()
    assert [line.count("0,1,2") for line in lines] == [1, 1]
    assert all("Qwen3_5ForCausalLM" in line and "tokens/s" in line for line in lines)
    # what it found is said at the start
    for words in ("the output of layer i", "never packed", "flash-linear-attention=", "loaded_s="):
        assert words in checked.stderr


def test_mistakes_are_one_or_two_lines(target_folder, tmp_path, capsys):
    before = signal.getsignal(signal.SIGTERM)
    empty = tmp_path / "empty"
    empty.write_text("\n")
    lines = tmp_path / "lines"
    lines.write_text("two\nlines")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        layer = ("--target", target_folder, "--layers", "0")
        cases = [
            (("--target", str(tmp_path), "--layers", "0"), 1, "config.json"),
            (("--target", target_folder, "--layers", "3"), 2, "last layer"),
            (("--target", target_folder), 1, "--layers"),
            ((*layer, "--listen", f"127.0.0.1:{port}"), 1, "--listen"),
            ((*layer, "--token-file", str(tmp_path / "none")), 1, "No such file"),
            ((*layer, "--token-file", str(empty)), 1, "is empty"),
            ((*layer, "--token-file", str(lines)), 1, "one line of printable ASCII"),
            ((*layer, "--tls-cert", str(lines), "--tls-key", str(lines)), 1, "no PEM certificate"),
            (("--ping", f"127.0.0.1:{port}", "--tls-cert", str(lines)), 1, "no PEM certificate"),
            ((*layer, "--listen", "nohost.invalid:0", "--token-file", str(lines)), 1, "--listen"),
            (("--target", f"{target_folder}/config.json", "--layers", "0"), 1, "is a file"),
            ((*layer, "--listen", "::1:8815"), 2, "[::1]:8815"),
            ((*layer, "--listen", "127.0.0.1:65535", "--devices", "cpu,cpu"), 2, "up to 65536"),
            ((*layer, "--devices", "meta"), 2, "--devices"),
            (("--target", target_folder, "--layers", "0,0"), 2, "must be distinct"),
            ((*layer, "--check", "--data", "x", "--output", "y", "--limit", "1"), 2, "exclude"),
            ((*layer, "--data-timeout", "nan"), 2, "--data-timeout"),
            ((*layer, "--data-timeout", "-1"), 2, "--data-timeout"),
            (("--ping", ""), 2, "--ping"),
            (("--ping", "localhost"), 2, "HOST:PORT"),
            (("--target", target_folder, "--listen", "0.0.0.0:0"), 2, "--token-file"),
            (("--target", target_folder, "--listen", "8815"), 2, "HOST:PORT"),
            (("--target", target_folder, "--devices", "tpu:9"), 2, "--devices"),
            ((), 2, "--target"),
        ]
        for flags, code, message in cases:
            with pytest.raises((UserError, SystemExit)) as caught:
                extract_hidden_online.main(list(flags))
            error = caught.value
            text = str(error) if isinstance(error, UserError) else capsys.readouterr().err
            assert (error.exit_code if isinstance(error, UserError) else error.code) == code
            assert message in text.splitlines()[-1], (flags, text)
    signal.signal(signal.SIGTERM, before)


def test_loopback_has_several_names():
    for host in ("LOCALHOST", "127.1.2.3", "::1", "::ffff:127.0.0.1"):
        assert extract_hidden_online.is_loopback(host), host
    for host in ("0.0.0.0", "::", "::ffff:10.0.0.1", "localhost.example"):
        assert not extract_hidden_online.is_loopback(host), host


def children_of(pid):
    out = subprocess.run(["ps", "--ppid", str(pid), "-o", "pid="], capture_output=True, text=True)
    return [int(line) for line in out.stdout.split()]


def wait_until_gone(address, timeout_s=20):
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            describe(address)
        except UserError:
            return
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.slow
def test_servers_of_several_devices_end_together(target_folder, tmp_path):
    flags = ("--devices", "cpu,cpu")
    with (tmp_path / "log").open("w") as log, serving(target_folder, *flags, stderr=log) as process:
        addresses = [process.stdout.readline().strip() for _ in range(2)]
        os.kill(children_of(process.pid)[1], signal.SIGKILL)
        assert process.wait(timeout=30) == 1
    last = (tmp_path / "log").read_text().splitlines()[-1]
    assert "cpu (server 2) ended with exit code -9" in last
    for signum in (signal.SIGHUP, signal.SIGKILL):
        with serving(target_folder, *flags) as process:
            addresses = [process.stdout.readline().strip() for _ in range(2)]
            process.send_signal(signum)
            process.wait(timeout=30)
            for address in addresses:
                wait_until_gone(address)


def test_a_status_line_tells_what_is_done(target_folder, tmp_path):
    """On the loopback of the newer protocol, whose addresses have colons of their own."""
    flags = ("--target", target_folder, "--layers", "0,1,2", "--listen", "[::1]:0")
    with (tmp_path / "log").open("w") as log, running(*flags, stderr=log) as process:
        address = process.stdout.readline().strip()
        assert address.startswith("[::1]:")
        served = ServedHiddenStates([address], connect_timeout_s=60)
        for request in requests(5):
            served.submit(request).result(timeout=60)
        deadline = time.monotonic() + 30
        while "streams=2" not in (tmp_path / "log").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.2)
        served.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 143
    (line,) = [line for line in (tmp_path / "log").read_text().splitlines() if "streams=2" in line]
    for field in ("requests=5", "tok/s_last_10s=", "busy=", "queue=0"):
        assert field in line


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_a_server_whose_trainer_stays(target_folder, tmp_path, signum, code):
    (request,) = requests(1)
    with (tmp_path / "log").open("w") as log, serving(target_folder, stderr=log) as process:
        served = ServedHiddenStates([process.stdout.readline().strip()], connect_timeout_s=60)
        served.submit(request).result(timeout=60)
        for _ in range(2):  # the second one, of an impatient person, changes nothing
            process.send_signal(signum)
        assert process.wait(timeout=30) == code
        served.close()
    lines = (tmp_path / "log").read_text().splitlines()
    (line,) = [line for line in lines if " INFO extract: run " in line]
    facts = json.loads(line.split(" run ", 1)[1])
    assert facts["counts"] == {"requests": 1, "tokens": sum(map(len, request))}
    assert facts["settings"]["layers"] == list(LAYERS) and "torch" in facts["packages"]
    assert not any("Traceback" in line for line in lines)
