"""Settings that hold for every test: one torch thread, no network lookups by libraries."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest  # noqa: E402

from tests.servers import moto, rclone  # noqa: E402, F401


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory):
    """A folder of this run, common to its workers."""
    root = tmp_path_factory.getbasetemp()
    return root.parent if "PYTEST_XDIST_WORKER" in os.environ else root


@pytest.fixture(scope="session")
def tiny(shared_folder):
    """The countings and what is made of them (tiny_run.Parts), once for all; only to be read."""
    from tests import tiny_run  # torch, which not every file needs

    return tiny_run.make_parts(shared_folder / "tiny")


def pytest_collection_modifyitems(items):
    """Tests that fork come first: a child of a process with gRPC's threads may hang at once."""
    items.sort(key=lambda item: item.path.name not in ("test_workers.py", "test_encoding.py"))
