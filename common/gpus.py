"""GPUs as their makers describe them, or as this machine's own measure."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from common.run import UsageError, UserError

MEASURED_SIZE = 8192  # of square matrices: large enough for a GPU's full rate
MEASURED_BYTES = 256 << 20
MEASURED_S = 2.0


@dataclass(frozen=True)
class Gpu:
    """One GPU of a kind; rates are peaks, bf16 with float32 sums and no sparsity.

    memory_mib: what the driver reports, MiB · tflops: TFLOP/s · link_gb_per_s: GB/s in one
    direction, to the other GPUs of its machine.
    """

    title: str
    memory_mib: int
    tflops: float
    link_gb_per_s: float

    @property
    def memory_bytes(self) -> int:
        return self.memory_mib << 20


# NVIDIA's data sheets, their figures "with sparsity" halved. Memory is what nvidia-smi shows for
# the card. RTX PRO 6000: 188 SMs x 1,024 FLOP x 2.617 GHz; its Max-Q edition has the same peak on
# paper and half the power. PCIe 5 x16 is 63 GB/s each way, PCIe 4 x16 half of it.
GPUS = {
    "rtx-pro-6000-blackwell": Gpu("RTX PRO 6000 Blackwell", 97_887, 503.8, 63.0),
    "rtx-5090": Gpu("GeForce RTX 5090", 32_607, 209.5, 63.0),
    "l40s": Gpu("L40S", 46_068, 362.0, 31.5),
    "a100": Gpu("A100 80GB SXM", 81_920, 312.0, 300.0),
    "h100": Gpu("H100 SXM", 81_559, 989.0, 450.0),
    "h200": Gpu("H200 SXM", 143_771, 989.0, 450.0),
    "b200": Gpu("B200 SXM", 183_359, 2250.0, 900.0),
}
DEFAULT_GPU = "rtx-pro-6000-blackwell"


def measured_gpu() -> Gpu:
    """The first GPU of this machine: its memory, and the rates it reaches in a few seconds.

    Raises UsageError where torch sees none, UserError where it cannot run there.
    """
    if not torch.cuda.is_available():
        raise UsageError(f"--gpu auto: torch sees no CUDA device here; give {', '.join(GPUS)}")
    device = torch.device("cuda", 0)
    try:
        return _measure(device)
    except RuntimeError as error:  # out of memory; a card that this build of torch has no code for
        raise UserError(
            f"--gpu auto: cannot measure {device} ({str(error).splitlines()[0]}); end what runs "
            f"there, or give {', '.join(GPUS)}"
        ) from error


def _measure(device: torch.device) -> Gpu:
    facts = torch.cuda.get_device_properties(device)
    other = torch.device("cuda", 1) if torch.cuda.device_count() > 1 else torch.device("cpu")
    return Gpu(
        title=f"{facts.name} (measured)",
        memory_mib=facts.total_memory >> 20,
        tflops=matmul_rate(device, size=MEASURED_SIZE, seconds=MEASURED_S) / 1e12,
        link_gb_per_s=copy_rate(other, device, size=MEASURED_BYTES, seconds=MEASURED_S) / 1e9,
    )


def matmul_rate(device: torch.device, *, size: int, seconds: float) -> float:
    """FLOP/s of bf16 products of square matrices, after one that is not counted."""
    one, other = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(one)

    def multiply() -> None:
        torch.mm(one, other, out=product)

    return 2 * size**3 * _calls_per_s(multiply, device, seconds)


def copy_rate(source: torch.device, to: torch.device, *, size: int, seconds: float) -> float:
    """Bytes/s from one device to another; a host's memory is pinned for it."""
    pinned = source.type == "cpu" and to.type == "cuda"
    data = torch.zeros(size, dtype=torch.uint8, device=source, pin_memory=pinned)
    copy = torch.empty(size, dtype=torch.uint8, device=to)
    return size * _calls_per_s(lambda: copy.copy_(data, non_blocking=True), to, seconds)


def _calls_per_s(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    call()
    wait()
    began, calls = time.monotonic(), 0
    while (spent := time.monotonic() - began) < seconds:
        for _ in range(10):
            call()
        wait()
        calls += 10
    return calls / spent
