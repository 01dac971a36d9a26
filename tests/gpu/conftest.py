"""Leaves this folder out where there is no GPU."""

from tests.gpu import COLLECTED

collect_ignore_glob = [] if COLLECTED else ["test_*.py"]
