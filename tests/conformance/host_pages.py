"""Pages of SGLang's host pools, as arrays with the axes of page_values.logical_page.

Runs inside the SGLang environment, after sglang_env.prepare().
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conformance import page_values


def page_view(host: Any, kind: str, index: int) -> dict[str, Any]:
    """Return one page of a host pool as writable tensors, with page_values.logical_page's axes.

    index: the page's first token index in the host pool, or a Mamba pool's slot.
    """
    index //= getattr(host, "dcp_size", 1)  # the ranks share the indices, each has its tokens
    page, end, layout = index // host.page_size, index + host.page_size, host.layout
    if kind == "mha":
        buffers = {"page": host.kv_buffer}
        if isinstance(host.kv_buffer, tuple):  # K and V of different width
            buffers = {
                part: buffer[None] for part, buffer in zip("kv", host.kv_buffer, strict=True)
            }
        tokens = slice(index, end)
        return {part: _mha_view(buffer, layout, page, tokens) for part, buffer in buffers.items()}
    if kind == "mla":
        return {"page": _mla_view(host.kv_buffer, layout, page, slice(index, end))}
    if kind in ("dsv4", "blocks") or hasattr(host, "item_bytes"):
        return {"page": host.kv_buffer[page].flatten(0, -2)}
    if kind == "dsa_indexer":
        buffer = host.index_k_with_scale_buffer
        return {"page": buffer[:, page] if layout == "layer_first" else buffer[page].squeeze(1)}
    if kind == "logical":
        return {"page": torch.empty(0, dtype=torch.uint8)}
    packed = hasattr(host, "row_bytes")  # rows of MiniMax-M3
    return {"page": host.kv_buffer[page]} if packed else _states_view(host, index)


def _states_view(host: Any, index: int) -> dict[str, Any]:
    states = {"temporal": host.temporal_buffer} if host.temporal_buffer.numel() else {}
    states |= {f"conv_{number}": buffer for number, buffer in enumerate(host.conv_buffer)}
    found = {part: buffer[index].squeeze(1) for part, buffer in states.items()}
    slots = getattr(host, "slot_state_buffers", None) or ()  # 0.5.18 has none
    sides = {f"side_{number}": buffer for number, buffer in enumerate(slots)}
    return found | {part: buffer[index] for part, buffer in sides.items()}


def fill(view: dict[str, Any], values: page_values.Parts, kind: str) -> None:
    """Write values into a page; padding layers after them stay unchanged."""
    for place, array in _placed(view, values, kind):
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        place.view(tensor.dtype).copy_(tensor)


def holds(view: dict[str, Any], values: page_values.Parts, kind: str) -> bool:
    """Return whether a page has exactly these bits."""
    return all(
        np.array_equal(
            place.contiguous().view(torch.uint8).numpy(),
            np.ascontiguousarray(array).view(np.uint8),
        )
        for place, array in _placed(view, values, kind)
    )


def spoil(view: dict[str, Any], byte: int) -> None:
    """Fill a page with one byte."""
    for tensor in view.values():
        tensor.copy_(_one_byte(tensor, byte))


def is_spoiled(view: dict[str, Any], byte: int) -> bool:
    """Return whether all bytes of a page are this one."""
    return all(
        bool((tensor.contiguous().view(torch.uint8) == byte).all()) for tensor in view.values()
    )


def _one_byte(tensor: Any, byte: int) -> Any:
    bytes_of_one = torch.full((tensor.element_size(),), byte, dtype=torch.uint8)
    return bytes_of_one.view(tensor.dtype).expand(tensor.shape)


def _placed(
    view: dict[str, Any], values: page_values.Parts, kind: str
) -> Iterator[tuple[Any, Any]]:
    """Yield the values with their places in host memory, without padding layers."""
    if kind != "opaque":
        for part, array in values.items():
            yield view[part] if kind == "mha" else view[part][: len(array)], array
        return
    at = 0
    for tensor in view.values():  # a page of unknown form lies in several tensors
        place = tensor.view(-1).view(torch.uint8)
        yield place, values["page"][at : at + len(place)]
        at += len(place)


def _mha_view(buffer: Any, layout: str, page: int, tokens: slice) -> Any:
    if layout == "layer_first":
        return buffer[:, :, tokens]
    if layout == "page_first":
        return buffer[:, tokens].transpose(1, 2)
    if layout == "page_first_direct":
        return buffer[:, page]
    return buffer[:, page].permute(0, 3, 2, 1, 4)  # page_head: heads, tokens, layers


def _mla_view(buffer: Any, layout: str, page: int, tokens: slice) -> Any:
    if layout == "page_first_direct":
        return buffer[page].squeeze(2)
    if layout == "page_first":
        return buffer[tokens].transpose(0, 1).squeeze(2)
    return buffer[:, tokens].squeeze(2)
