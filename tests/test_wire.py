"""The wire in one process: what is answered, what is refused, what a failing server costs."""

import contextlib
import datetime
import ipaddress
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import flight

from common import client as client_module
from common import server as server_module
from common import wire
from common.client import ServedHiddenStates, describe, server_stats
from common.run import UserError
from common.server import HiddenStateServer
from common.target import Taps, Target
from common.wire import ColocatedHiddenStates, Description
from tests.servers import free_port
from tests.tiny_models import tiny_target

WIDTH = 2 * 64  # two taps of 64
POISON = 99  # a token id on which FailingHiddenStates fails


class FailingHiddenStates(ColocatedHiddenStates):
    """A target whose device fails on some documents, or on all."""

    def __init__(self, target, *, always=False):
        super().__init__(target, max_tokens_per_request=200)
        self.always, self.tries = always, 0

    def compute(self, documents, *, final):
        if self.always or documents[0][0] == POISON:
            self.tries += 1
            raise RuntimeError("CUDA error: unspecified launch failure")
        return super().compute(documents, final=final)


class SlowHiddenStates(ColocatedHiddenStates):
    """Waits in the middle of each request until told to go on."""

    def __init__(self, target):
        super().__init__(target, max_tokens_per_request=200)
        self.started, self.go_on = threading.Event(), threading.Event()

    def compute(self, documents, *, final):
        self.started.set()
        assert self.go_on.wait(timeout=30)
        return super().compute(documents, final=final)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_target(tmp_path_factory.mktemp("target") / "tiny", kind="qwen3"))


def load(folder, layers=(0, 2)):
    return Target.load(
        folder, layers=layers, dtype=torch.float32, device=torch.device("cpu"), final=True
    )


@pytest.fixture(scope="module")
def own(folder):
    """What is served here."""
    return ColocatedHiddenStates(load(folder), max_tokens_per_request=200)


@pytest.fixture(scope="module")
def apart(folder):
    """What is expected: another copy, since a target is used by one thread at a time."""
    return ColocatedHiddenStates(load(folder), max_tokens_per_request=200)


@contextlib.contextmanager
def serve(hidden_states, *, port=0, token=None, certificates=()):
    """A server in this process; clients must have let go of it at the end."""
    server = HiddenStateServer(
        f"{'grpc+tls' if certificates else 'grpc'}://127.0.0.1:{port}",
        hidden_states,
        token=token,
        tls_certificates=certificates,
    )
    try:
        yield server
    finally:
        assert server.stop(grace_s=10), "a client still holds a stream"


@contextlib.contextmanager
def client(*servers, **options):
    addresses = [f"127.0.0.1:{server.port}" for server in servers]
    served = ServedHiddenStates(addresses, **{"connect_timeout_s": 20, **options})
    try:
        yield served
    finally:
        served.close()


def requests(count, seed=0):
    generator = np.random.default_rng(seed)
    return [
        [
            generator.integers(0, 98, size=int(length)).astype(np.int32)
            for length in generator.integers(1, 40, size=3)
        ]
        for _ in range(count)
    ]


def batch_of(documents):
    return pa.record_batch({"input_ids": pa.array(documents, type=pa.list_(pa.int32()))})


@contextlib.contextmanager
def exchange(server, schema, *, final=False):
    """The protocol as another program would speak it, without this project's client."""
    with flight.FlightClient(f"grpc://127.0.0.1:{server.port}") as raw:
        command = json.dumps({"version": 1, "final": final}).encode()
        writer, reader = raw.do_exchange(flight.FlightDescriptor.for_command(command))
        writer.begin(schema)
        yield writer, reader
        writer.done_writing()
        with pytest.raises(StopIteration):
            reader.read_chunk()
        writer.close()


def bytes_of(tensor):
    return tensor.contiguous().view(torch.int16).numpy().astype("<i2").tobytes()


@pytest.mark.parametrize("final", [False, True])
def test_an_answer_is_little_endian_bf16_then_an_end_marker(own, apart, monkeypatch, final):
    monkeypatch.setattr(wire, "ANSWER_BYTES", 5 * (WIDTH + 64 * final) * 2)  # five tokens a batch
    documents = [np.arange(7, dtype=np.int32), np.arange(6, dtype=np.int32)]
    want = apart.compute(documents, final=final)
    batch = batch_of(documents)
    with serve(own) as server, exchange(server, batch.schema, final=final) as (writer, reader):
        writer.write_with_metadata(batch, b"request 17")
        chunks = [reader.read_chunk() for _ in range(4)]
    columns = {"hidden": want.hidden} | ({"final": want.final} if final else {})
    assert [chunk.data.num_rows for chunk in chunks[:3]] == [5, 5, 3]
    for name, tensor in columns.items():
        assert chunks[0].data.schema.field(name).type == pa.binary(tensor.shape[1] * 2)
        rows = [row for chunk in chunks[:3] for row in chunk.data[name].to_pylist()]
        assert b"".join(rows) == bytes_of(tensor)
    assert chunks[0].data.schema.names == list(columns)
    assert {chunk.app_metadata.to_pybytes() for chunk in chunks[:3]} == {b"request 17"}
    assert chunks[3].data is None
    assert json.loads(chunks[3].app_metadata.to_pybytes()) == {"id": "request 17", "end": True}


def test_an_answer_of_many_batches_is_put_together(own, apart, monkeypatch):
    monkeypatch.setattr(wire, "ANSWER_BYTES", 4 * (WIDTH + 64) * 2)  # four tokens, or six, a batch
    (request,) = requests(1)
    want = apart.compute(request, final=True)
    assert len(want.hidden) > 20
    with serve(own) as server, client(server) as served:
        got = served.submit(request, final=True).result(timeout=30)
        assert torch.equal(got.hidden, want.hidden) and torch.equal(got.final, want.final)
        assert torch.equal(served.submit(request).result(timeout=30).hidden, want.hidden)


INT32 = pa.list_(pa.int32())


@pytest.mark.parametrize(
    ("name", "column", "message"),
    [
        ("tokens", pa.array([[1]], INT32), "column input_ids"),
        ("input_ids", pa.array([[1]], pa.list_(pa.int64())), "list<int32>"),
        ("input_ids", pa.array([[1], None], INT32), "without nulls"),
        ("input_ids", pa.array([[1, None]], INT32), "null tokens"),
        ("input_ids", pa.array([], INT32), "needs documents"),
        ("input_ids", pa.array([[1], []], INT32), "at least one token"),
        ("input_ids", pa.array([[1, 128]], INT32), "token id 128"),
        ("input_ids", pa.array([[-1]], INT32), "token id -1"),
        ("input_ids", pa.array([[0] * 201], INT32), "--max-tokens-per-request"),
    ],
)
def test_a_malformed_request_is_answered_with_the_problem(own, name, column, message):
    batch = pa.record_batch({name: column})
    with serve(own) as server, exchange(server, batch.schema) as (writer, reader):
        for request_id in (b"a", b"b"):  # twice: the stream lives on
            writer.write_with_metadata(batch, request_id)
            answer = reader.read_chunk()
            assert answer.data is None
            problem = json.loads(answer.app_metadata.to_pybytes())
            assert problem["id"] == request_id.decode() and message in problem["error"]


def test_other_versions_and_unknown_actions_are_refused(own):
    with serve(own) as server, flight.FlightClient(f"grpc://127.0.0.1:{server.port}") as raw:
        with pytest.raises(flight.FlightError, match="describe"):
            list(raw.do_action(flight.Action("restart", b"")))
        for command in (b'{"version": 2, "final": false}', b"[]", b"\xff"):
            _, reader = raw.do_exchange(flight.FlightDescriptor.for_command(command))
            with pytest.raises(flight.FlightError, match="version"):
                reader.read_chunk()
    facts = json.loads(own.description.to_json())
    assert Description.from_json(own.description.to_json()) == own.description
    with pytest.raises(UserError, match="protocol version 2"):
        Description.from_json(json.dumps({**facts, "version": 2}).encode())


def test_a_server_may_start_after_its_trainer(own):
    port, waits = free_port(), []
    with contextlib.ExitStack() as stack:
        late = threading.Timer(1.0, lambda: stack.enter_context(serve(own, port=port)))
        late.start()
        served = ServedHiddenStates(
            [f"127.0.0.1:{port}"], connect_timeout_s=30, on_wait=waits.append
        )
        late.join()
        assert waits and served.description == own.description
        served.close()


def test_no_server_at_all_is_one_line_with_the_address():
    address, began = f"127.0.0.1:{free_port()}", time.monotonic()
    with pytest.raises(UserError, match=f"within 1 s.*{address}") as caught:
        ServedHiddenStates([address], connect_timeout_s=1)
    assert time.monotonic() - began < 15 and len(str(caught.value).splitlines()) == 1


def test_a_request_that_no_server_can_compute_is_given_up(folder):
    failing = FailingHiddenStates(load(folder))
    (good,) = requests(1)
    with serve(failing) as server, client(server, connect_timeout_s=2) as served:
        lost = served.submit([np.array([POISON, 1], np.int32)])
        with pytest.raises(UserError, match=rf"127\.0\.0\.1:{server.port}.*CUDA error"):
            lost.result(timeout=30)
        assert 1 < failing.tries < 20  # asked again, but not in a loop
        assert served.submit(good).result(timeout=30).hidden.shape[1] == WIDTH


def test_a_server_with_a_broken_device_costs_no_request(folder, own, apart):
    broken, work = FailingHiddenStates(load(folder), always=True), requests(30)
    with serve(broken) as one, serve(own) as two, client(one, two) as served:
        answers = [served.submit(request) for request in work]
        for request, answer in zip(work, answers, strict=True):
            want = apart.compute(request, final=False).hidden
            assert torch.equal(answer.result(timeout=60).hidden, want)
    assert broken.tries > 0


def test_servers_that_differ_are_named(folder, own):
    other = ColocatedHiddenStates(load(folder, layers=(0, 1)), max_tokens_per_request=200)
    with serve(own) as one, serve(other) as two, client(one, two) as served:
        time.sleep(1.0)  # found while nothing is asked for
        for request in requests(3):
            with pytest.raises(UserError, match=rf"{two.port} serves.*\(0, 1\).*\(0, 2\)"):
                served.submit(request).result(timeout=30)


def test_a_stopping_server_finishes_its_request_and_takes_no_other(folder, own, apart):
    slow, (first, second) = SlowHiddenStates(load(folder)), requests(2)
    server = HiddenStateServer("grpc://127.0.0.1:0", slow, token=None, tls_certificates=[])
    ended = []
    with serve(own) as another:
        with client(server) as served:
            answer = served.submit(first)
            assert slow.started.wait(timeout=30)
            stop = threading.Thread(target=lambda: ended.append(server.stop(grace_s=20)))
            stop.start()
            time.sleep(0.3)
            assert stop.is_alive() and not answer.done()
            slow.go_on.set()
            want = apart.compute(first, final=False).hidden
            assert torch.equal(answer.result(timeout=30).hidden, want)
            stop.join(timeout=30)
            assert ended == [
                False
            ]  # the client holds its streams open, and that is no reason to wait
            slow.started.clear()
            unanswered = served.submit(second)
            time.sleep(1.0)
            assert not unanswered.done() and not slow.started.is_set()
        with client(another) as served:
            assert served.submit(second).result(timeout=30).hidden.shape[1] == WIDTH


@pytest.mark.parametrize("token", [b"", b"two\nlines", b"\xff\xfe"])
def test_a_token_that_no_header_can_carry_is_refused_on_both_sides(own, token):
    with pytest.raises(UserError, match="--token-file"), serve(own, token=token):
        pass
    with serve(own) as server, pytest.raises(UserError, match="--token-file"):
        describe(f"127.0.0.1:{server.port}", token=token)


def test_an_empty_secret_file_is_refused(tmp_path):
    (tmp_path / "token").write_text("\n")
    with pytest.raises(UserError, match="empty"):
        wire.read_secret(tmp_path / "token")


def self_signed():
    """A certificate for 127.0.0.1 and its key, PEM."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return certificate.public_bytes(pem), secret


def test_tls_with_a_token_gives_the_same_bits_and_lets_nobody_else_in(own, apart):
    certificate, key = self_signed()
    stranger, _ = self_signed()
    (request,) = requests(1)
    with serve(own, token=b"secret", certificates=[(certificate, key)]) as server:
        with client(server, token=b"secret", tls_root_certs=certificate) as served:
            got = served.submit(request).result(timeout=30).hidden
        assert torch.equal(got, apart.compute(request, final=False).hidden)
        address = f"127.0.0.1:{server.port}"
        for options, reason in (
            ({"token": b"other", "tls_root_certs": certificate}, "refuses the token"),
            ({"token": b"secret", "tls_root_certs": stranger}, "certificate is not the one"),
            ({"token": b"secret"}, "if it speaks TLS, give its --tls-cert"),
        ):
            with pytest.raises(UserError, match=reason):
                describe(address, **options)
    with serve(own) as plain, pytest.raises(UserError, match="does not speak TLS"):
        describe(f"127.0.0.1:{plain.port}", tls_root_certs=certificate)


def resident_bytes():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


class BigHiddenStates(ColocatedHiddenStates):
    """Answers of 40 MB, made anew each time."""

    def compute(self, documents, *, final):
        tokens = sum(map(len, documents))
        return Taps(torch.full((tokens, WIDTH), 0.5, dtype=torch.bfloat16), None)


@pytest.fixture
def big(folder):
    return BigHiddenStates(load(folder), max_tokens_per_request=200_000)


def test_a_reader_that_does_not_read_costs_one_answer(big):
    batch = batch_of([np.zeros(156_250, np.int32)])  # 40 MB of answer
    with serve(big) as server:
        with flight.FlightClient(f"grpc://127.0.0.1:{server.port}") as raw:
            command = json.dumps({"version": 1}).encode()
            writer, reader = raw.do_exchange(flight.FlightDescriptor.for_command(command))
            writer.begin(batch.schema)
            before = resident_bytes()

            def ask_on():
                with contextlib.suppress(flight.FlightError):  # the end of the stream
                    for _ in range(30):
                        writer.write_with_metadata(batch, b"x")

            asking = threading.Thread(target=ask_on)
            asking.start()
            time.sleep(3)
            grown = resident_bytes() - before
            assert server.stats()["requests"] <= 1 and server.stats()["streams"] == 1
            # one answer, its copy in the client's socket, and some requests of 0.6 MB
            assert grown < 200e6, f"{grown / 1e6:.0f} MB for 30 answers of 40 MB"
            with client(server) as served:  # and nobody else waits for it
                answer = served.submit([np.zeros(100, np.int32)])
                assert answer.result(timeout=30).hidden.shape == (100, WIDTH)
            reader.cancel()
            asking.join(timeout=30)
        wait_until(lambda: server.stats()["streams"] == 0)


def wait_until(condition, timeout_s=20):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_client_that_vanishes_frees_its_place(folder, apart):
    slow, (request,) = SlowHiddenStates(load(folder)), requests(1)
    with serve(slow) as server:
        with flight.FlightClient(f"grpc://127.0.0.1:{server.port}") as raw:
            command = json.dumps({"version": 1}).encode()
            writer, reader = raw.do_exchange(flight.FlightDescriptor.for_command(command))
            writer.begin(batch_of(request).schema)
            writer.write_with_metadata(batch_of(request), b"1")
            assert slow.started.wait(timeout=30)
            reader.cancel()
        slow.go_on.set()
        with client(server) as served:
            want = apart.compute(request, final=False).hidden
            assert torch.equal(served.submit(request).result(timeout=30).hidden, want)
        wait_until(lambda: server.stats()["streams"] == 0 and server.stats()["queue"] == 0)


def test_no_more_streams_than_a_server_can_hold_answers_for(own, monkeypatch):
    monkeypatch.setattr(server_module, "MAX_STREAMS", 1)
    schema = batch_of([np.zeros(1, np.int32)]).schema
    with serve(own) as server, exchange(server, schema):
        wait_until(lambda: server.stats()["streams"] == 1)
        with flight.FlightClient(f"grpc://127.0.0.1:{server.port}") as raw:
            command = json.dumps({"version": 1}).encode()
            _, reader = raw.do_exchange(flight.FlightDescriptor.for_command(command))
            with pytest.raises(flight.FlightError, match="1 streams are open"):
                reader.read_chunk()


def test_turns_go_to_whoever_waited_longest():
    turns, order = server_module._Turns(), []

    def work(name):
        with turns.turn():
            order.append(name)

    with turns.turn():
        threads = []
        for name in range(5):
            threads.append(threading.Thread(target=work, args=(name,)))
            threads[-1].start()
            wait_until(lambda expected=name + 1: turns.waiting == expected)
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3, 4] and turns.waiting == 0


def test_stats_count_what_was_done(own):
    (request,) = requests(1)
    with serve(own) as server, client(server) as served:
        before = server_stats(f"127.0.0.1:{server.port}")
        served.submit(request).result(timeout=30)
        after = server_stats(f"127.0.0.1:{server.port}")
        assert before["requests"] == 0 and after["requests"] == 1
        assert after["tokens"] == sum(map(len, request))
        assert 0 < after["busy_s"] < after["up_s"] and after["streams"] == 1


@pytest.mark.slow
def test_a_server_that_answers_nothing_any_more_is_left(folder, own, apart, monkeypatch):
    """As when its machine loses power, or its process is stopped: no connection ever ends."""
    monkeypatch.setattr(client_module, "SILENT_S", 1.0)
    monkeypatch.setattr(client_module, "DESCRIBE_TIMEOUT_S", 1.0)
    work = requests(6)
    command = [sys.executable, "-c", FROZEN, folder]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        port = int(process.stdout.readline())
        with serve(own) as healthy:
            addresses = [f"127.0.0.1:{port}", f"127.0.0.1:{healthy.port}"]
            served = ServedHiddenStates(addresses, connect_timeout_s=60)
            time.sleep(0.5)
            process.send_signal(signal.SIGSTOP)
            answers = [served.submit(request) for request in work]
            for request, answer in zip(work, answers, strict=True):
                want = apart.compute(request, final=False).hidden
                assert torch.equal(answer.result(timeout=60).hidden, want)
            process.kill()
            served.close()


FROZEN = """
import sys, torch
from common.server import HiddenStateServer
from common.target import Taps, Target
from common.wire import ColocatedHiddenStates

target = Target.load(
    sys.argv[1], layers=(0, 2), dtype=torch.float32, device=torch.device("cpu"), final=True
)
hidden_states = ColocatedHiddenStates(target, max_tokens_per_request=200)
server = HiddenStateServer(
    "grpc://127.0.0.1:0", hidden_states, token=None, tls_certificates=[]
)
print(server.port, flush=True)
server.wait()
"""

IDS = st.lists(st.one_of(st.integers(-(2**31), 2**31 - 1), st.none()), max_size=9)
COLUMNS = st.one_of(
    st.lists(st.one_of(IDS, st.none()), max_size=4).map(lambda v: pa.array(v, INT32)),
    st.lists(IDS, max_size=4).map(lambda v: pa.array(v, pa.large_list(pa.int32()))),
    st.lists(st.text(max_size=5), max_size=4).map(pa.array),
    st.lists(st.binary(max_size=5), max_size=4).map(lambda v: pa.array(v, pa.binary())),
)


@given(name=st.sampled_from(["input_ids", "x", ""]), column=COLUMNS, start=st.integers(0, 2))
@settings(max_examples=300, deadline=None)
def test_any_batch_is_a_request_or_a_named_problem(name, column, start):
    """A slice too: its offsets do not begin at 0."""
    try:
        documents = wire.read_documents(pa.record_batch({name: column}).slice(start))
    except ValueError as error:
        assert str(error)
        return
    assert name == "input_ids"
    assert [document.tolist() for document in documents] == column.slice(start).to_pylist()


def test_garbage_on_the_port_and_on_the_stream_leaves_the_server_alive(own, apart):
    generator, (request,) = np.random.default_rng(0), requests(1)
    with serve(own) as server:
        for _ in range(40):
            with socket.create_connection(("127.0.0.1", server.port)) as raw:
                raw.sendall(generator.bytes(int(generator.integers(1, 3000))))
        with flight.FlightClient(f"grpc://127.0.0.1:{server.port}") as raw:
            for _ in range(40):
                command = generator.bytes(int(generator.integers(0, 60)))
                _, reader = raw.do_exchange(flight.FlightDescriptor.for_command(command))
                with pytest.raises((flight.FlightError, pa.ArrowException)):
                    reader.read_chunk()
        with client(server) as served:
            want = apart.compute(request, final=False).hidden
            assert torch.equal(served.submit(request).result(timeout=30).hidden, want)
