"""The wire in one process: what is answered, what is refused, what a failing server costs."""

import contextlib
import copy
import dataclasses
import datetime
import ipaddress
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
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
from common.client import ServedHiddenStates
from common.connection import describe, server_stats
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
OFFSETS = pa.array([0, 3, 1, 4], pa.int32())
FALLING = pa.ListArray.from_arrays(OFFSETS, pa.array([1] * 4, pa.int32()))


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
        ("input_ids", pa.array([[]] * 201, INT32), "--max-tokens-per-request"),
        ("input_ids", FALLING, "non-monotonic|monotonically|Offset"),
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
            assert problem["id"] == request_id.decode()
            assert re.search(message, problem["error"]), problem["error"]


def test_a_request_of_many_bytes_and_few_tokens_is_refused():
    """pyarrow's own writer leaves out what offsets do not name; others need not."""
    tokens = pa.array(np.zeros(100_000, np.int32))
    column = pa.ListArray.from_arrays(pa.array([0, 3], pa.int32()), tokens)
    with pytest.raises(ValueError, match="bytes in one request"):
        wire.read_documents(pa.record_batch({"input_ids": column}), max_tokens=200)


def test_a_long_id_is_refused_and_not_sent_back(own):
    batch = batch_of([np.zeros(3, np.int32)])
    with serve(own) as server, exchange(server, batch.schema) as (writer, reader):
        writer.write_with_metadata(batch, b"x" * 257)
        problem = json.loads(reader.read_chunk().app_metadata.to_pybytes())
        assert problem["id"] == "" and "256 at most" in problem["error"]


COMMANDS = (
    b'{"version": 2, "final": false}', b'{"version": 1, "final": "no"}', b"[]", b"\xff",
    b"[" * 100_000,
)  # fmt: skip


def test_other_versions_and_unknown_actions_are_refused(own):
    with serve(own) as server, flight.FlightClient(f"grpc://127.0.0.1:{server.port}") as raw:
        with pytest.raises(flight.FlightError, match="describe"):
            list(raw.do_action(flight.Action("restart", b"")))
        for command in COMMANDS:
            _, reader = raw.do_exchange(flight.FlightDescriptor.for_command(command))
            with pytest.raises(flight.FlightError, match="version"):
                reader.read_chunk()
    facts = json.loads(own.description.to_json())
    assert Description.from_json(own.description.to_json()) == own.description
    with pytest.raises(UserError, match="protocol version 2"):
        Description.from_json(json.dumps({**facts, "version": 2}).encode())
    del facts["embedding_sha256"]
    for odd in (json.dumps(facts).encode(), json.dumps({**facts, "new": 1}).encode(), b"[]", b"{"):
        with pytest.raises(UserError, match="same checkout"):
            Description.from_json(odd)


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
            with pytest.raises(
                UserError, match=rf"{two.port} serves.*\(0, 1\), not \(0, 2\).*--layers"
            ):
                served.submit(request).result(timeout=30)


def test_servers_must_agree_on_their_batches_and_not_on_the_targets_name(own, apart):
    def described(**facts):
        other = copy.copy(apart)
        other.description = dataclasses.replace(own.description, **facts)
        return other

    (request,) = requests(1)
    with serve(own) as one:
        with serve(described(max_tokens_per_batch=99)) as two, client(one, two) as served:
            time.sleep(1.0)
            with pytest.raises(UserError, match=r"its max_tokens_per_batch is (99|8192), not"):
                served.submit(request).result(timeout=30)
        free = described(target="elsewhere", max_tokens_per_request=300)
        with serve(free) as two, client(one, two) as served:
            time.sleep(1.0)
            assert served.submit(request).result(timeout=30).hidden.shape[1] == WIDTH


def test_every_server_must_answer_what_a_trainer_needs(own, apart):
    less = copy.copy(apart)
    less.description = dataclasses.replace(own.description, max_tokens_per_request=50)
    with serve(own) as one, serve(less) as two, client(one, two, tokens_per_request=200) as served:
        time.sleep(1.0)
        message = rf"{two.port} answers 50 tokens.*--max-tokens-per-request 200"
        with pytest.raises(UserError, match=message):
            served.submit(requests(1)[0]).result(timeout=30)


def test_an_answer_of_no_known_kind_fails_its_request_and_no_thread(own, monkeypatch):
    (request,) = requests(1)
    with serve(own) as server, client(server) as served:
        with monkeypatch.context() as patch:
            patch.setattr(client_module.Stream, "_read_answer", lambda *_, **__: {}["hidden"])
            with pytest.raises(UserError, match=r"cannot be read \(KeyError: 'hidden'\)"):
                served.submit(request).result(timeout=30)
        assert served.submit(request).result(timeout=30).hidden.shape[1] == WIDTH


def test_a_token_that_is_refused_later_ends_the_waiting_at_once(own):
    port, (request,) = free_port(), requests(1)
    with serve(own, port=port, token=b"first"):
        served = ServedHiddenStates([f"127.0.0.1:{port}"], token=b"first", connect_timeout_s=300)
        served.submit(request).result(timeout=30)
        for stream in list(served._streams.values()):
            stream.cancel()
    with (
        serve(own, port=port, token=b"second"),
        pytest.raises(UserError, match="refuses the token"),
    ):
        served.submit(request).result(timeout=30)
    served.close()


def test_wrong_tokens_are_logged_without_the_token(own, caplog):
    with serve(own, token=b"right-secret") as server:
        for token in (b"wrong-secret", None):
            with pytest.raises(UserError, match="refuses the token"):
                describe(f"127.0.0.1:{server.port}", token=token)
    (line,) = [line for line in caplog.messages if "refused a call" in line]  # one in 10 s
    assert "a wrong token" in line and "secret" not in caplog.text


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


def test_secrets_are_looked_at_before_anything_else(tmp_path):
    def file(name, data):
        (tmp_path / name).write_bytes(data)
        return tmp_path / name

    with pytest.raises(UserError, match="empty"):
        wire.read_secret(file("token", b"\n"))
    certificate, key = self_signed()
    good, own_key = file("cert", certificate), file("key", key)
    other_key, garbage = file("other", self_signed()[1]), file("garbage", b"\xffgarbage")
    assert wire.read_server_certificate(None, None) == []
    assert wire.read_server_certificate(good, own_key) == [(certificate.strip(), key.strip())]
    for pair in ((good, other_key), (good, garbage), (garbage, own_key), (good, good)):
        with pytest.raises(UserError, match="PEM"):
            wire.read_server_certificate(*pair)
    with pytest.raises(UserError, match="holds no PEM certificate"):
        wire.read_certificates(garbage)


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
            ({"token": b"secret"}, "it speaks TLS: give its certificate"),
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


def test_nothing_is_computed_for_clients_that_are_gone(folder):
    slow, (first, second) = SlowHiddenStates(load(folder)), requests(2)
    computed = []
    slow.compute = lambda documents, **_: (
        computed.append(len(documents)), SlowHiddenStates.compute(slow, documents, final=False)
    )[1]  # fmt: skip
    command = flight.FlightDescriptor.for_command(json.dumps({"version": 1}).encode())
    with serve(slow) as server:
        location = f"grpc://127.0.0.1:{server.port}"
        with flight.FlightClient(location) as raw:
            exchanges = [raw.do_exchange(command) for _ in range(2)]
            for (writer, _), request in zip(exchanges, (first, second), strict=True):
                writer.begin(batch_of(request).schema)
                writer.write_with_metadata(batch_of(request), b"1")
                assert slow.started.wait(timeout=30)
            wait_until(lambda: server.stats()["queue"] == 1)
            for _, reader in exchanges:
                reader.cancel()
        time.sleep(0.3)
        slow.go_on.set()
        wait_until(lambda: server.stats()["streams"] == 0)
    assert len(computed) == 1


def test_clients_that_read_or_ask_no_more_are_hung_up_on(own, big, monkeypatch, caplog):
    for name, value in {"STUCK_S": 0.5, "IDLE_S": 0.5, "LOOK_S": 0.1, "MAX_STREAMS": 1}.items():
        monkeypatch.setattr(server_module, name, value)
    command = flight.FlightDescriptor.for_command(json.dumps({"version": 1}).encode())
    batch = batch_of([np.zeros(156_250, np.int32)])  # 40 MB of answer
    with serve(big) as server, flight.FlightClient(f"grpc://127.0.0.1:{server.port}") as raw:
        writer, reader = raw.do_exchange(command)
        writer.begin(batch.schema)
        writer.write_with_metadata(batch, b"x")
        wait_until(lambda: "hung up on" in caplog.text and server.stats()["streams"] == 0)
        with pytest.raises(pa.ArrowException):
            writer.close()
    with serve(own) as server, flight.FlightClient(f"grpc://127.0.0.1:{server.port}") as raw:
        writer, reader = raw.do_exchange(command)
        writer.begin(batch.schema)
        wait_until(lambda: server.stats()["streams"] == 1)
        time.sleep(1.0)
        assert server.stats()["streams"] == 1  # nobody else wants its place
        own_connection = [("grpc.use_local_subchannel_pool", 1)]
        location = f"grpc://127.0.0.1:{server.port}"
        with flight.FlightClient(location, generic_options=own_connection) as other:
            wait_until(lambda: is_answered(other, command))
        with pytest.raises(pa.ArrowException):
            writer.close()
    assert sum("hung up on ipv4:127.0.0.1:" in line for line in caplog.messages) == 2


def is_answered(raw, command):
    """Whether a stream is let in and answers, not turned away for want of room."""
    batch = batch_of([np.zeros(5, np.int32)])
    writer, reader = raw.do_exchange(command)
    with contextlib.suppress(pa.ArrowException):
        writer.begin(batch.schema)
        writer.write_with_metadata(batch, b"x")
        return reader.read_chunk().data is not None
    return False


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_an_address_of_a_connection_is_found(host):
    bare = host.strip("[]")
    family = socket.AF_INET6 if ":" in bare else socket.AF_INET
    listening = socket.create_server((bare, 0), family=family)
    with listening, socket.create_connection(listening.getsockname()[:2]) as one:
        accepted, _ = listening.accept()
        kind = "ipv6" if ":" in bare else "ipv4"
        server_module._hang_up(f"{kind}:{urllib.parse.quote(host)}:{one.getsockname()[1]}")
        assert one.recv(1) == b""
        accepted.close()


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
def test_the_only_server_when_stopped_is_waited_for_as_long_as_said(folder, monkeypatch):
    for name in ("SILENT_S", "LIFE_SIGN_TIMEOUT_S"):
        monkeypatch.setattr(client_module, name, 1.0)
    command = [sys.executable, "-c", FROZEN, folder]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        address = f"127.0.0.1:{int(process.stdout.readline())}"
        served = ServedHiddenStates([address], connect_timeout_s=4)
        served.submit(requests(1)[0]).result(timeout=30)
        process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(UserError, match=f"no hidden-state server for 4 s.*{address}"):
            served.submit(requests(1)[0]).result(timeout=30)
        assert 3 < time.monotonic() - began < 8
        process.kill()
        served.close()


@pytest.mark.slow
def test_a_server_that_answers_nothing_any_more_is_left(folder, own, apart, monkeypatch):
    """As when its machine loses power, or its process is stopped: no connection ever ends."""
    monkeypatch.setattr(client_module, "SILENT_S", 1.0)
    monkeypatch.setattr(client_module, "LIFE_SIGN_TIMEOUT_S", 1.0)
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
        documents = wire.read_documents(
            pa.record_batch({name: column}).slice(start), max_tokens=1000
        )
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
