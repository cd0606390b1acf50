"""Keys and values in blocks of a shared pool, so that sequences of any length share memory.

A sequence owns a list of blocks instead of a stretch of memory (Kwon et al. 2023, "Efficient
Memory Management for Large Language Model Serving with PagedAttention", arXiv:2309.06180,
section 4): nothing is kept for a length it never reaches, and what it leaves behind fits the next
one. `PagedCache` shows some sequences to the decoder as one batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from model.config import ModelConfig


class BlockPool:
    """Memory for `blocks` blocks of `block_size` tokens in every layer, allocated once.

    A block is taken by one sequence and may be shared by others that begin with the same tokens;
    it is free again when the last of them has given it back.

    Raises ValueError in one line for sizes below 1.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        blocks: int,
        block_size: int = 16,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        for name, value in (("blocks", blocks), ("block_size", block_size)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        self.blocks = blocks
        self.block_size = block_size
        self.kv_heads = config.kv_heads
        shape = (config.n_layer, 2, blocks, config.kv_heads, block_size, config.head_size)
        self._memory = torch.zeros(shape, device=device, dtype=dtype)
        # One (blocks, Hkv, block_size, D) per layer, taken apart here and not once per token.
        self.keys = [layer[0] for layer in self._memory]
        self.values = [layer[1] for layer in self._memory]
        self._free = list(range(blocks - 1, -1, -1))  # the last is taken first
        self._users = [0] * blocks

    @property
    def device(self) -> torch.device:
        """Where the memory is."""
        return self._memory.device

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def nbytes(self) -> int:
        """Memory of keys and values in bytes, used or not."""
        return self._memory.nbytes

    @property
    def block_nbytes(self) -> int:
        """Memory of one block in bytes, over all layers."""
        return self._memory.nbytes // self.blocks

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold so many tokens."""
        return -(-tokens // self.block_size)

    def take(self, count: int) -> list[int]:
        """Take `count` blocks, filled with zeros.

        Attention gives what lies beyond a sequence no weight, but 0 times a NaN left behind by
        another sequence would still be a NaN; hence the zeros. Raises ValueError when fewer are
        free; nothing is taken then.
        """
        if count > self.free:
            raise ValueError(
                f"the cache has {self.free} of its {self.blocks} blocks of {self.block_size} "
                f"tokens free; {count} are needed (cache_tokens)"
            )
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._users[block] = 1
        if taken:
            self._memory[:, :, taken] = 0
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """Count one more user of blocks that are in use."""
        for block in blocks:
            assert self._users[block]
            self._users[block] += 1

    def give_back(self, blocks: Sequence[int]) -> None:
        """Count one user less; blocks without any are free."""
        for block in blocks:
            assert self._users[block]
            self._users[block] -= 1
            if not self._users[block]:
                self._free.append(block)

    def copy_block(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` tokens of a block."""
        self._memory[:, :, target, :, :tokens] = self._memory[:, :, source, :, :tokens]


class PagedSequence:
    """The blocks of one sequence, in order; the last ones may be reserved and still empty."""

    def __init__(self, pool: BlockPool):
        self.pool = pool
        self.length = 0  # tokens
        self.blocks: list[int] = []

    @property
    def nbytes(self) -> int:
        """Memory of its blocks in bytes; blocks it shares count in full."""
        return len(self.blocks) * self.pool.block_nbytes

    def missing_blocks(self, tokens: int) -> int:
        """How many more blocks it needs to hold `tokens` tokens altogether."""
        return max(0, self.pool.blocks_for(tokens) - len(self.blocks))

    def reserve(self, tokens: int) -> None:
        """Take the blocks for `tokens` tokens altogether; ValueError if they are not free."""
        self.blocks += self.pool.take(self.missing_blocks(tokens))

    def fork(self, length: int) -> PagedSequence:
        """Make a sequence that begins with the first `length` tokens of this one.

        Full blocks are shared. Both sequences will write behind the fork, so a block that is not
        full is copied. Raises ValueError if no block is free for the copy.
        """
        assert length <= self.length
        full, rest = divmod(length, self.pool.block_size)
        own = self.pool.take(1 if rest else 0)
        if rest:
            self.pool.copy_block(self.blocks[full], own[0], rest)
        self.pool.share(self.blocks[:full])
        other = PagedSequence(self.pool)
        other.blocks = self.blocks[:full] + own
        other.length = length
        return other

    def release(self) -> None:
        """Give all blocks back and begin anew."""
        self.pool.give_back(self.blocks)
        self.blocks = []
        self.length = 0


class PagedCache:
    """Some sequences of one pool as the decoder's cache; see `model.kv_cache.KVCache`.

    Sequences may have any lengths, and may come and go between batches: the view is made anew,
    the sequences stay. While one is in a view, nobody else may change it.
    """

    def __init__(self, sequences: Sequence[PagedSequence]):
        assert sequences
        self.sequences = list(sequences)
        self._pool = pool = sequences[0].pool
        self._heads = torch.arange(pool.kv_heads, device=pool.device)
        self._lengths = self._tensor([sequence.length for sequence in sequences])  # (B,)
        self._table = self._make_table()  # (B, blocks)
        self._read_from = self._table  # (B * Hkv * blocks,): rows of the pool, for `append`
        self._write_to = (self._table, self._table)  # blocks and places in them, (B, n) each

    @property
    def length(self) -> int:
        """Tokens of the longest sequence."""
        return max(sequence.length for sequence in self.sequences)

    @property
    def capacity(self) -> int:
        """Tokens that a sequence could hold if it had the pool to itself."""
        return self._pool.blocks * self._pool.block_size

    @property
    def lengths(self) -> Tensor | None:
        """Tokens of each sequence, (B,) int32 on the device; None when they are equal."""
        if len({sequence.length for sequence in self.sequences}) == 1:
            return None
        return self._lengths.to(torch.int32)

    @property
    def nbytes(self) -> int:
        """Memory of the blocks in use here in bytes; a shared one counts once."""
        used = {block for sequence in self.sequences for block in sequence.blocks}
        return len(used) * self._pool.block_nbytes

    def extend(self, n: int) -> Tensor:
        """Reserve the next n places of every sequence; return their positions, (B, n).

        Raises ValueError when the pool has too few free blocks; nothing has changed then.
        """
        self._take_blocks(n)
        positions = self._lengths[:, None] + torch.arange(n, device=self._pool.device)
        self._lengths = self._lengths + n
        for sequence in self.sequences:
            sequence.length += n
        block_size = self._pool.block_size
        blocks = self._table.gather(1, positions // block_size)
        self._write_to = (blocks, positions % block_size)
        visible = self._table[:, None, : self._pool.blocks_for(self.length)]  # (B, 1, blocks)
        self._read_from = (visible * self._pool.kv_heads + self._heads[:, None]).flatten()
        return positions

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v (B, Hkv, n, D); return copies of all so far, (B, Hkv, S, D).

        S is the length of the longest sequence. What stands behind a shorter one is finite.
        """
        assert k.shape[0] == len(self.sequences)
        pool = self._pool
        return self._store(pool.keys[layer], k), self._store(pool.values[layer], v)

    def reset(self) -> None:
        """Forget everything; the blocks go back to the pool."""
        for sequence in self.sequences:
            sequence.release()
        self._lengths = torch.zeros_like(self._lengths)
        self._table = self._make_table()

    def _store(self, memory: Tensor, new: Tensor) -> Tensor:
        """Write (B, Hkv, n, D) into one layer's keys or values, and gather the batch from it."""
        blocks, places = self._write_to
        memory[blocks, :, places] = new.transpose(1, 2).to(memory.dtype)
        B, H, _, D = new.shape
        # A row is one head's share of a block, so whole rows are copied and nothing moves twice.
        gathered = memory.view(-1, self._pool.block_size * D).index_select(0, self._read_from)
        return gathered.view(B, H, -1, D)[:, :, : self.length]

    def _take_blocks(self, n: int) -> None:
        """Give every sequence the blocks for n more tokens, or raise and give none of them any."""
        missing = [s.missing_blocks(s.length + n) for s in self.sequences]
        if not any(missing):
            return
        taken = self._pool.take(sum(missing))
        for sequence, count in zip(self.sequences, missing, strict=True):
            sequence.blocks += taken[:count]
            del taken[:count]
        self._table = self._make_table()

    def _make_table(self) -> Tensor:
        """The blocks of every sequence, (B, blocks); a shorter list goes on with its first."""
        width = max(len(sequence.blocks) for sequence in self.sequences)
        rows = [s.blocks + s.blocks[:1] * (width - len(s.blocks)) for s in self.sequences]
        return self._tensor([row or [0] * width for row in rows])

    def _tensor(self, numbers: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._pool.device)
