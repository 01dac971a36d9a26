"""Settings that hold for every test: one torch thread, no network lookups by libraries."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from tests.servers import moto, rclone  # noqa: E402, F401


def pytest_collection_modifyitems(items):
    """Tests that fork come first: a child of a process with gRPC's threads may hang at once."""
    items.sort(key=lambda item: item.path.name not in ("test_workers.py", "test_encoding.py"))
