"""Settings that hold for every test: one torch thread, no network lookups by libraries."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest  # noqa: E402

from tests.servers import moto, rclone  # noqa: E402, F401


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """The countings and what is made of them (tiny_run.Parts), once for all; only to be read."""
    from tests import tiny_run  # torch, which not every file needs

    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # of this run, and common to its workers
    return tiny_run.make_parts(root / "tiny")


def pytest_collection_modifyitems(items):
    """Tests that fork come first: a child of a process with gRPC's threads may hang at once."""
    items.sort(key=lambda item: item.path.name not in ("test_workers.py", "test_encoding.py"))
