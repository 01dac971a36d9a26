"""Settings that hold for every test: one torch thread, no network lookups by libraries."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from tests.servers import moto, rclone  # noqa: E402, F401
