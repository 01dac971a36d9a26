"""What only a GPU can show; collected only where CUDA is.

GPU_CHECKS_DEVICE=cpu runs it without one, in the forms that a CPU has: that tries the checks
themselves, and says nothing of a GPU.
"""

import os

import torch

ON_CUDA = torch.cuda.is_available()
COLLECTED = ON_CUDA or os.environ.get("GPU_CHECKS_DEVICE") == "cpu"
DEVICE = torch.device("cuda" if ON_CUDA else "cpu")
