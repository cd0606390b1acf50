"""The streaming cache's definition: nothing is ever turned back, every key is rotated anew."""

import torch
from torch import Tensor

from kernels.attention import attention
from model.decoder import Decoder
from model.positions import rotate


class SlowStream:
    """Keeps every key before its rotation, and picks what to see.

    A model in float64 without a cache. With the tokens 0 .. t read, it attends to the first
    `sinks` and the last capacity - sinks of them, rotated at 0, 1, 2, ... in that order.
    """

    def __init__(self, model: Decoder, capacity: int, sinks: int) -> None:
        self.model = model
        self.capacity = capacity
        self.sinks = sinks
        self.read = 0
        self.keys: list[list[Tensor]] = [[] for _ in model.blocks]
        self.values: list[list[Tensor]] = [[] for _ in model.blocks]

    def seen(self) -> list[int]:
        everything = list(range(self.read))
        if self.read <= self.capacity:
            return everything
        return everything[: self.sinks] + everything[self.read - self.capacity + self.sinks :]

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """Logits (B, n, V) for the next tokens of each sequence, (B, n); n = 1 once it evicts."""
        self.read += tokens.shape[1]
        x = self.model.embed(tokens)
        for layer in range(len(self.model.blocks)):
            x = self._block(layer, x)
        return self.model.lm_head(self.model.norm(x))

    def all_logits(self, tokens: Tensor, first: int = 1) -> Tensor:
        """Logits (B, T, V) of tokens (B, T), the first ones at once and the others singly."""
        chunks = [first] + [1] * (tokens.shape[1] - first)
        return torch.cat([self.logits(part) for part in tokens.split(chunks, 1)], dim=1)

    def _block(self, layer: int, x: Tensor) -> Tensor:
        block = self.model.blocks[layer]
        inside = block.attn_norm(x)
        q, k, v = block.attn.queries_keys_values(inside, None)  # not rotated
        self.keys[layer] += k.split(1, dim=2)
        self.values[layer] += v.split(1, dim=2)
        keys = torch.cat([self.keys[layer][i] for i in self.seen()], dim=2)
        values = torch.cat([self.values[layer][i] for i in self.seen()], dim=2)
        if self.model.rope is not None:
            places = torch.arange(keys.shape[2])[None]
            q = self._rotated(q, places[:, -q.shape[2] :])
            keys = self._rotated(keys, places)
        out = attention(q, keys, values, block.attn.spec(), backend="eager").out
        heads = out.transpose(1, 2).flatten(2)
        if block.attn.gate_proj is not None:
            heads = heads * torch.sigmoid(block.attn.gate_proj(inside))
        x = x + block.attn.o_proj(heads)
        return x + block.mlp(block.mlp_norm(x))

    def _rotated(self, x: Tensor, places: Tensor) -> Tensor:
        rotation = self.model.rope.at(places, places.shape[1])
        return rotate(x.transpose(1, 2), rotation).transpose(1, 2)
