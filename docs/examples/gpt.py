"""A small GPT in PyTorch, and English text that ships with Python: nothing is downloaded."""

from __future__ import annotations

from functools import cache
from pydoc_data.topics import topics

import numpy as np
import torch
from torch import nn
from torch.nn import functional

TEST_FRACTION = 0.1


@cache
def text() -> tuple[torch.Tensor, torch.Tensor, int]:
    """Python's help texts as numbers of characters: to train, to validate; and how many numbers."""
    whole = "\n".join(topics[name] for name in sorted(topics))
    letters = sorted(set(whole))
    number = {letter: i for i, letter in enumerate(letters)}
    codes = torch.tensor([number[letter] for letter in whole])
    first = round((1 - TEST_FRACTION) * len(codes))
    return codes[:first], codes[first:], len(letters)


class Block(nn.Module):
    """Attention and a perceptron, each behind a normalization and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) to the same."""
        batch, length, width = x.shape
        split = (batch, length, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(self.norm1(x)).view(split).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Predicts each next character: 3.2 million parameters by default."""

    def __init__(
        self, letters: int, context: int = 64, width: int = 256, layers: int = 4, heads: int = 4
    ) -> None:
        super().__init__()
        self.context = context
        self.letter, self.place = nn.Embedding(letters, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, letters)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """Logits of the characters behind each of (batch, length) characters."""
        x = self.letter(codes) + self.place.weight[: codes.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits

    def loss(self, codes: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of (batch, length + 1) characters, each from those before it."""
        logits = self(codes[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), codes[:, 1:].flatten())


def windows(codes: torch.Tensor, count: int, length: int, rng: np.random.Generator) -> torch.Tensor:
    """Pieces of a text, from anywhere."""
    starts = rng.integers(0, len(codes) - length, count)
    return torch.stack([codes[start : start + length] for start in starts])
