"""Keep the token rows that sparse attention selects in a small device buffer, as HiSparse does.

All rows stay in page objects in host memory. Each layer of each request has N device slots. A step
loads the missing rows of its top-k into the least recently selected slots. The counterpart in
SGLang is load_cache_to_device_buffer_kernel of kernels/jit/csrc/kvcacheio/hisparse.cuh.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch

from hicachectl.kernels.sparse_triton import HostRows, StepPlan, gather_rows, plan_step


class SparseLoader:
    """Buffers for each layer of each of R requests: N slots, and one more for the newest token.

    tokens: [layers, R, N] int32, the position in each slot; -1 if the slot is empty.
    lru:    [layers, R, N] int32, slots, least recently used first. Slots that one step uses keep
            their order.

    The newest token's row comes from the model. The caller writes the row at `newest_locs` before
    attention reads it, and to host memory before the sequence grows further. Steps share scratch
    memory, so launch all steps on one stream.
    """

    def __init__(self, rows: HostRows, *, top_k: int, slots: int | None = None) -> None:
        """Allocate the buffers on the device of rows.pages.

        top_k: largest number of positions that a step selects for a request.
        slots: N, the number of slots; None for 2 * top_k.
        Raises ValueError if top_k is not 1 to N, locs exceed int32, or memory is not page-locked.
        """
        self.rows = rows
        self.slots = 2 * top_k if slots is None else slots
        self.requests, columns = rows.pages.shape
        self._check_fits(top_k)
        device = rows.pages.device
        if device.type == "cuda" and not rows.memory.is_pinned():
            raise ValueError("memory is not page-locked; register it with cudaHostRegister")
        if self.requests * (self.slots + 1) > torch.iinfo(torch.int32).max:
            raise ValueError(f"{self.requests} requests of {self.slots} slots: locs exceed int32")
        state = (rows.layers, self.requests, self.slots)
        self.tokens = torch.empty(state, dtype=torch.int32, device=device)
        self.lru = torch.empty(state, dtype=torch.int32, device=device)
        self._loaded = torch.empty(state[:2], dtype=torch.int32, device=device)
        self._pools = torch.empty(
            (*state[:2], self.slots + 1, rows.row_bytes), dtype=torch.uint8, device=device
        )
        self._plan = StepPlan(self.requests, self.slots, columns * rows.page_size, device)
        for request in range(self.requests):
            self.reset(request)

    @property
    def fetched(self) -> torch.Tensor:
        """Number of rows that the last step fetched for each request: [R] int32 on the device."""
        return self._plan.counts

    def pool(self, layer: int) -> torch.Tensor:
        """Return the rows of a layer, indexed by loc: [R * (N + 1), row_bytes] uint8."""
        return self._pools[layer].view(-1, self.rows.row_bytes)

    def step(self, layer: int, topk: torch.Tensor, seq_len: torch.Tensor) -> torch.Tensor:
        """Load the selected tokens of a layer. Return their locs, [R, k] int32.

        A loc is a row of `pool(layer)`. It is -1 if the position is outside the sequence or its
        page is absent. Equal positions get the same loc. While a sequence has at most N tokens,
        each row is read from host memory only once. A sequence may be cut back to a length whose
        rows the host has.
        topk:    [R, k] int32, positions; -1 for no position.
        seq_len: [R] int32, length with the newest token; 0 leaves a request unchanged.

        Raises ValueError if an argument has another shape, dtype or device. Does not synchronise.
        """
        self._check_step(layer, topk, seq_len)
        state = (self.tokens[layer], self.lru[layer], self._loaded[layer])
        device = self.tokens.device  # Triton launches on the current device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            locs = plan_step(topk, seq_len, self.rows, *state, self._plan)
            gather_rows(self.rows, layer, self._plan, self._pools[layer])
        return locs

    def newest_locs(self, seq_len: torch.Tensor) -> torch.Tensor:
        """Return the locs of the newest tokens, the same in every layer: [R] int64.

        If a sequence is longer than N, its newest token is in slot N, behind the buffer.
        """
        requests = torch.arange(self.requests, device=seq_len.device)
        return requests * (self.slots + 1) + (seq_len.long() - 1).clamp(0, self.slots)

    def reset(self, request: int) -> None:
        """Empty the buffers of a request."""
        self.tokens[:, request] = -1
        self.lru[:, request] = torch.arange(self.slots, dtype=torch.int32, device=self.lru.device)
        self._loaded[:, request] = 0

    def _check_fits(self, k: int) -> None:
        if not 1 <= k <= self.slots:
            raise ValueError(f"top-k of {k} tokens: must be 1 to {self.slots}, the buffer's slots")

    def _check_step(self, layer: int, topk: torch.Tensor, seq_len: torch.Tensor) -> None:
        if not 0 <= layer < self.rows.layers:
            raise ValueError(f"layer {layer}: must be at least 0 and below {self.rows.layers}")
        for name, tensor, shape in (
            ("topk", topk, (self.requests, topk.shape[-1])),
            ("seq_len", seq_len, (self.requests,)),
        ):
            if tensor.dtype != torch.int32 or tensor.shape != shape or not tensor.is_contiguous():
                raise ValueError(
                    f"{name} is {tensor.dtype} {list(tensor.shape)}; must be contiguous, int32 and "
                    f"{list(shape)}"
                )
            if tensor.device != self.tokens.device:
                raise ValueError(f"{name} is on {tensor.device}, not on {self.tokens.device}")
        self._check_fits(topk.shape[1])
