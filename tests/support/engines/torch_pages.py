"""Checks that torch and numpy copy pages into equal slots. Runs in the engine's Python, with torch.

It uses tensors in host memory; streams and pinning, which need a GPU, are not covered.
"""

from __future__ import annotations

import torch

from tierd.shared_memory.exports import layout_error
from tierd_connectors.vllm.worker import torch as vllm_torch
from tierd_connectors.vllm.worker.export import HostPool
from tierd_connectors.vllm.worker.layout import PageMap, Pages, TensorView, blocks_of
from tierd_connectors.vllm.worker.torch import TorchPages

SIZES = {"L": 3, "B": 6, "H": 2, "N": 4, "C": 8}
LAYOUTS = ("LBHNC", "LBNHC", "BLNHC", "BLHNC", "BHNLC", "HBLNC", "LHBNC")


def layers_of(memory: torch.Tensor, layout: str) -> list[torch.Tensor]:
    """Each layer as the engine registers it: [B, H, N, C]."""
    shaped = memory.view(torch.float32).view([SIZES[axis] for axis in layout])
    return list(shaped.permute([layout.index(axis) for axis in "LBHNC"]))


def view_of(layer: torch.Tensor) -> TensorView:
    strides = tuple(stride * 4 for stride in layer.stride())
    allocation = layer.untyped_storage().data_ptr()
    return TensorView(layer.data_ptr(), allocation, tuple(layer.shape), strides, 4, layer)


def check(layers: list[torch.Tensor]) -> None:
    """Copy a block into a slot with torch and back with numpy, and the other way round."""
    blocks = blocks_of([view_of(layer) for layer in layers], SIZES["B"])
    ways: tuple[Pages, ...] = PageMap(blocks, layers), TorchPages(blocks, layers)
    for layer in layers:
        layer.copy_(torch.rand(layer.shape))
    slots = [[memoryview(bytearray(4096)) for _ in (1, 4)] for _ in ways]
    for way, pair in zip(ways, slots, strict=True):
        way.gather_many([1, 4], pair)
    assert slots[0] == slots[1]
    for way, pair in zip(ways, reversed(slots), strict=True):
        before = [layer.clone() for layer in layers]
        for layer in layers:
            layer[[2, 3]] = 0
        way.scatter_many(pair, [2, 3])
        for layer, was in zip(layers, before, strict=True):
            was[[2, 3]] = was[[1, 4]]
            assert torch.equal(layer, was)


def main() -> None:
    size_bytes = 4
    for size in SIZES.values():
        size_bytes *= size
    for layout in LAYOUTS:
        pool = HostPool()
        with pool.context():
            other = torch.zeros(8, dtype=torch.float32), torch.zeros((2, 2), dtype=torch.int8)
            assert pool.memory is None, "a tensor is not the engine's KV"
            memory = torch.zeros(size_bytes, dtype=torch.int8, device=torch.device("cpu"))
            again = torch.zeros(size_bytes, dtype=torch.int8, device="cpu")
        assert pool.memory is not None
        assert memory.data_ptr() == pool.memory.address
        assert again.data_ptr() != memory.data_ptr()
        assert memory.shape == (size_bytes,)
        assert not memory.any()
        layers = layers_of(memory, layout)
        check(layers)
        shown = pool.show(blocks_of([view_of(layer) for layer in layers], SIZES["B"]))
        assert not layout_error(shown.layout, [size_bytes], size_bytes // SIZES["B"])
        del other
    # Each layer in a separate allocation, and staging memory for one block.
    vllm_torch.STAGING_BYTES = 1
    layers = [torch.zeros([6, 2, 4, 8]) for _ in range(3)]
    check(layers)
    check(layers[::-1])
    print("same")


if __name__ == "__main__":
    main()
