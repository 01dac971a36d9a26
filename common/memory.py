"""How much memory a training step took, and what is left of the device."""

from dataclasses import dataclass

import torch

from common.machine import usable_memory
from common.timing import peak_memory_bytes


@dataclass(frozen=True)
class Memory:
    """Bytes: the peak so far, and what is left beside it."""

    peak: int
    left: int


def measure_memory(device: torch.device, *, still_to_come: int) -> Memory:
    """The peak of this process on its device, and what is left after `still_to_come` more.

    On CUDA torch's own peak; on a CPU the process's resident peak and the machine's free memory.
    """
    if device.type != "cuda":
        return Memory(peak_memory_bytes(), usable_memory() - still_to_come)
    peak = torch.cuda.max_memory_allocated(device)
    free, _ = torch.cuda.mem_get_info(device)
    own = torch.cuda.memory_reserved(device)
    return Memory(peak, free + own - peak - still_to_come)
