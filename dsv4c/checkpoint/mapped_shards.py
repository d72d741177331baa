"""Tensors as views of memory-mapped shards."""

import mmap
from pathlib import Path

import torch
from torch import Tensor

from dsv4c.checkpoint.safetensors import StoredTensor
from dsv4c.errors import CheckpointError

TORCH_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    # Exponent bytes and packed codes are bytes, whatever the file calls them.
    "F8_E8M0": torch.uint8,
    "U8": torch.uint8,
    "I8": torch.uint8,
    "I64": torch.int64,
}


class MappedShards:
    """Maps each shard on first use. Pages are read on demand and shared with the page cache."""

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}

    def _map(self, shard: Path) -> mmap.mmap:
        mapped = self._maps.get(shard)
        if mapped is None:
            try:
                with shard.open("rb") as file:
                    # Private and writable, because torch warns on read-only buffers; a write never reaches the file.
                    # Without reserve: a clean page needs no memory of its own.
                    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
                    mapped = mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            except (OSError, ValueError) as error:
                raise CheckpointError(f"cannot map {shard}: {error}") from error
            self._maps[shard] = mapped
        return mapped

    def view(self, stored: StoredTensor) -> Tensor:
        """The stored bytes in the stored dtype and shape (I8 and F8_E8M0 as uint8); do not write to it.

        A copy only where the extent is not aligned to its element size. Raises CheckpointError when the shard has
        shrunk since its header was read.
        """
        dtype = TORCH_DTYPES[stored.dtype]
        if stored.size_bytes == 0:
            return torch.empty(stored.shape, dtype=dtype)
        mapped = self._map(stored.shard)
        if stored.offset + stored.size_bytes > len(mapped):
            raise CheckpointError(f"{stored.shard} has shrunk to {len(mapped)} bytes since it was opened")
        data = torch.frombuffer(mapped, dtype=torch.uint8, count=stored.size_bytes, offset=stored.offset)
        if stored.offset % dtype.itemsize:
            data = data.clone()
        return data.view(dtype).view(stored.shape)

    def release(self, stored: StoredTensor) -> None:
        """Drops the pages of a tensor from this process; they are read again on the next use."""
        mapped = self._maps.get(stored.shard)
        if mapped is None or stored.size_bytes == 0:
            return
        # Whole pages: a neighbour's bytes on the first and last page are read again as well.
        start = stored.offset - stored.offset % mmap.PAGESIZE
        mapped.madvise(mmap.MADV_DONTNEED, start, stored.offset + stored.size_bytes - start)
