"""Compare the providers of device copies with each other and with a server's own copies.

    python -m tests.bench.bench_device --part providers

For each case of `bench_device`, about 1 GiB of objects are loaded into layer-first pools and
written back: with objects in device memory, as in verify, and in page-locked host memory, as in a
server. Every result must equal plain torch's, byte for byte. Copies from device memory are replayed
as a graph; the others are launched by Python, as in a server.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from hicachectl.device.plans import pool_form
from tests.bench.bench_device import (
    TOTAL_BYTES,
    Case,
    cases,
    copies,
    device_copy,
    expected_of,
    pages,
    rate,
    replayed,
)
from tests.bench.server_pools import ServerPools, jit_kernels
from tests.device.providers import TorchProvider, TritonProvider
from tests.device.sgl_provider import SglKernelProvider

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hicachectl.device.plans import PoolForm
    from tests.device.providers import Provider

    Copies = tuple[Callable[[], None], Callable[[], None]]

QUOTAS = (2, 64)  # thread blocks per launch; a server's default is 2
POISON = 0xA5


class Ceilings(NamedTuple):
    """GB/s of copies within the device (read and written), to it, and from it."""

    within: float
    to_device: float
    from_device: float


class Loaded(NamedTuple):
    """Objects of one case, and the pools that they must make."""

    case: Case
    form: PoolForm
    nbytes: int
    objects: torch.Tensor  # [n, stride], on the device
    pools: torch.Tensor
    expected: torch.Tensor
    slots: torch.Tensor

    @property
    def content(self) -> torch.Tensor:
        """The objects without the bytes between them."""
        return self.objects[:, : self.nbytes]


def measure_providers(device: torch.device) -> None:
    """Print GB/s of each provider, to load and to write back."""
    providers: dict[str, Provider] = {"triton": TritonProvider()}
    try:
        providers |= {f"sgl {n}": SglKernelProvider(blocks=n) for n in QUOTAS}
    except ImportError:
        print("sgl_kernel is not installed: only Triton is measured, and compared with torch")
    served = len(providers) > 1
    host = torch.empty(TOTAL_BYTES * 9 // 8, dtype=torch.uint8, pin_memory=True)
    ceilings = Ceilings(device_copy(device), *bus_rates(host, device))
    print(f"copies within the device {ceilings.within:.0f} GB/s read and written, to it "
          f"{ceilings.to_device:.1f}, from it {ceilings.from_device:.1f}\n")  # fmt: skip
    print("GB/s to load / to write back: bytes read and written if objects are in device memory,")
    print("else bytes of objects. sgl N: sgl_kernel with at most N thread blocks per launch.")
    if served:
        jit = "its JIT kernels" if jit_kernels() else "sgl_kernel, since sglang is not installed"
        print(f"server: SGLang's own calls, for page_first with {jit}.")
    print(f"{'':38}{'objects':8}" + "".join(f"{name:>16}" for name in (*providers, "server")))
    # Not on the default stream, which cudaMemcpyBatchAsync refuses.
    with torch.cuda.stream(torch.cuda.Stream(device)):
        for case in cases():
            loaded = load(case, device)
            print_row(case.name, "device", within_device(loaded, providers), 0)
            figures = [*from_host(loaded, providers, host)]
            if served:
                figures.append(of_server(loaded))
            print_row("", "host", iter(figures), 1)


def print_row(name: str, place: str, figures: Iterator[tuple[float, float] | None], n: int) -> None:
    """Print a line of figures with n decimals."""
    cells = ("-" if each is None else f"{each[0]:.{n}f} / {each[1]:.{n}f}" for each in figures)
    print(f"{name:38}{place:8}" + "".join(f"{cell:>16}" for cell in cells), flush=True)


def bus_rates(host: torch.Tensor, device: torch.device) -> tuple[float, float]:
    """Return GB/s of cudaMemcpyAsync to and from the device."""
    part, other = host[:TOTAL_BYTES], torch.empty(TOTAL_BYTES, dtype=torch.uint8, device=device)
    to_device = rate(TOTAL_BYTES, lambda: other.copy_(part, non_blocking=True))
    return to_device, rate(TOTAL_BYTES, lambda: part.copy_(other, non_blocking=True))


def load(case: Case, device: torch.device) -> Loaded:
    """Make objects of a case, each with its number in front, and load them by plain torch."""
    kind = expected_of(case)
    count = max(2, TOTAL_BYTES // kind.nbytes)
    some = torch.from_numpy(pages(case, kind, min(count, 64))).to(device)
    objects = some.repeat(-(-count // len(some)), 1)[:count].contiguous()
    objects.view(torch.int64)[:, 0] = torch.arange(count, device=device)
    form = pool_form(kind.tensors)
    pools = torch.empty(count * form.page_bytes, dtype=torch.uint8, device=device)
    slots = torch.from_numpy(np.random.default_rng(2).permutation(count)).to(device)
    loaded = Loaded(case, form, kind.nbytes, objects, pools, torch.empty_like(pools), slots)
    scatter, _ = copies(form, TorchProvider(), objects, loaded.expected, slots)
    scatter()
    return loaded


def check(loaded: Loaded, work: Copies, objects: dict[int, torch.Tensor]) -> None:
    """Run both copies once, into poisoned memory.

    objects: what is written back, [n, bytes] each, by its place in an object.
    """
    loaded.pools.fill_(POISON)
    work[0]()
    assert torch.equal(loaded.pools, loaded.expected), f"{loaded.case.name}: load"
    for part in objects.values():
        part.fill_(POISON)
    work[1]()
    torch.cuda.synchronize()
    for offset, part in objects.items():
        original = loaded.content[:, offset : offset + part.shape[1]]
        assert torch.equal(part.to(original.device), original), f"{loaded.case.name}: write back"


def supported(loaded: Loaded, provider: Provider) -> bool:
    """Return whether a provider carries out all plans itself."""
    plans = loaded.form.plans(len(loaded.slots))
    return not isinstance(provider, SglKernelProvider) or all(map(provider.supports, plans))


def checked(
    loaded: Loaded, providers: dict[str, Provider], objects: torch.Tensor
) -> Iterator[Copies | None]:
    """Yield each provider's copies, once they gave the right bytes; None if it has others do it."""
    for provider in providers.values():
        if not supported(loaded, provider):
            yield None
            continue
        work = copies(loaded.form, provider, objects, loaded.pools, loaded.slots)
        check(loaded, work, {0: objects[:, : loaded.nbytes]})
        yield work


def within_device(
    loaded: Loaded, providers: dict[str, Provider]
) -> Iterator[tuple[float, float] | None]:
    """Measure copies from and to objects in device memory."""
    moved = 2 * len(loaded.objects) * loaded.nbytes
    for work in checked(loaded, providers, loaded.objects.clone()):
        yield work and (rate(moved, replayed(work[0])), rate(moved, replayed(work[1])))


def from_host(
    loaded: Loaded, providers: dict[str, Provider], host: torch.Tensor
) -> Iterator[tuple[float, float] | None]:
    """Measure copies from and to objects in page-locked host memory."""
    objects = host[: loaded.objects.numel()].view(loaded.objects.shape).copy_(loaded.objects)
    moved = len(objects) * loaded.nbytes
    for work in checked(loaded, providers, objects):
        yield work and (rate(moved, work[0]), rate(moved, work[1]))


def of_server(loaded: Loaded) -> tuple[float, float] | None:
    """Measure the server's own copies, from and to its own host pools."""
    server = ServerPools(loaded.case, loaded.form, loaded.content.cpu(), loaded.pools, loaded.slots)
    work = server.copies()
    if work is None:
        return None
    tensors = loaded.form.tensors
    check(loaded, work, {t.offset: b for t, b in zip(tensors, server.buffers, strict=True)})
    measure = partial(rate, len(loaded.slots) * loaded.nbytes)
    return measure(work[0]), measure(work[1])
