"""The same encoder in torch, only for fitting, with gradients. Texts lie end to end; only attention pads them."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from sds.models.fitting.base import Array, BaseEncoder, BertSizes, layer_names

DROPPED_OF_256 = 26  # a tenth
OUT_OF_SIGHT = -1e4  # added to the score of padding


class Layout:
    """Where the N tokens of B texts lie: packed [N, ...], end to end, or padded [B, T, ...], side by side.

    `columns` [N]: each token's place in its text. `unseen` [B, 1, 1, T]: added to scores, so that padding is not attended to.
    """

    def __init__(self, lengths: Tensor, longest: int) -> None:
        """`lengths` [B]; `longest` is T."""
        present = torch.arange(longest) < lengths[:, None]
        self.present = present.flatten().nonzero().squeeze(-1)
        self.columns = self.present % longest
        self.shape = (len(lengths), longest)
        self.unseen = torch.where(present, 0.0, OUT_OF_SIGHT)[:, None, None, :]

    def packed(self, padded: Tensor) -> Tensor:
        return padded.flatten(0, 1)[self.present]

    def padded(self, packed: Tensor) -> Tensor:
        rows, longest = self.shape
        empty = packed.new_zeros(rows * longest, *packed.shape[1:])
        return empty.index_copy(0, self.present, packed).view(rows, longest, *packed.shape[1:])


class Layer(nn.Module):
    """One layer of BERT, with the norm after each half."""

    def __init__(self, sizes: BertSizes) -> None:
        super().__init__()
        width, inner = sizes.hidden, sizes.intermediate
        self.heads = sizes.heads
        self.parts = nn.ModuleDict({part: nn.Linear(width, width) for part in ("query", "key", "value", "context")})
        self.parts["rise"], self.parts["fall"] = nn.Linear(width, inner), nn.Linear(inner, width)
        for part in ("attention_norm", "output_norm"):
            self.parts[part] = nn.LayerNorm(width, eps=sizes.epsilon)

    def forward(self, hidden: Tensor, layout: Layout) -> Tensor:
        """Return the layer's output for the tokens. [N, H] -> [N, H]."""
        first = [self.parts[part] for part in ("query", "key", "value")]
        weight, bias = (torch.cat([getattr(part, name) for part in first]) for name in ("weight", "bias"))
        together = layout.padded(functional.linear(hidden, weight, bias))
        query, key, value = together.view(*layout.shape, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        with torch.autocast("cpu", enabled=False):  # autocast copies scores to 32 bits, in which softmax sums anyway
            scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2) + layout.unseen.to(key.dtype)
            mixed = scores.softmax(-1) @ value
        context = self.parts["context"](layout.packed(mixed.transpose(1, 2).flatten(-2)))
        hidden = self.parts["attention_norm"](hidden + dropped(context, training=self.training))
        inner = self.parts["fall"](functional.gelu(self.parts["rise"](hidden)))
        whole: Tensor = self.parts["output_norm"](hidden + dropped(inner, training=self.training))
        return whole


def dropped(numbers: Tensor, *, training: bool) -> Tensor:
    """Return the numbers with a tenth of them set to 0 during training, by torch's generator: eight of them a draw.

    torch's own dropout draws once for each number, which is slow on a processor.
    """
    if not training:
        return numbers
    bits = torch.empty(-(-numbers.numel() // 8), dtype=torch.int64).random_(-(2**63), None).view(torch.uint8)
    kept = (bits[: numbers.numel()] >= DROPPED_OF_256).view(numbers.shape)
    return numbers * kept * (256 / (256 - DROPPED_OF_256))


class Classifier(nn.Module):
    """An encoder, the mean over its tokens and a linear head. The word embeddings are not trained."""

    def __init__(self, encoder: BaseEncoder, values: int) -> None:
        super().__init__()
        sizes = encoder.sizes
        self.words = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.places = nn.Embedding(sizes.positions, sizes.hidden)
        self.norm = nn.LayerNorm(sizes.hidden, eps=sizes.epsilon)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.head = nn.Linear(sizes.hidden, values)
        self._load(encoder)

    def _load(self, encoder: BaseEncoder) -> None:
        weights = encoder.weights
        places = weights["embeddings.position_embeddings.weight"]
        if (segments := weights.get("embeddings.token_type_embeddings.weight")) is not None:
            places = places + segments[0]
        with torch.no_grad():
            self.words.weight.copy_(torch.from_numpy(weights["embeddings.word_embeddings.weight"]))
            self.places.weight.copy_(torch.from_numpy(places))
            for name, module in self.named_parts():
                module.weight.copy_(torch.from_numpy(weights[f"{name}.weight"]))
                module.bias.copy_(torch.from_numpy(weights[f"{name}.bias"]))

    def named_parts(self) -> list[tuple[str, nn.Linear | nn.LayerNorm]]:
        """Return the linear maps and norms by their names in a checkpoint, without the head."""
        found: list[tuple[str, nn.Linear | nn.LayerNorm]] = [("embeddings.LayerNorm", self.norm)]
        for number, layer in enumerate(self.layers):
            parts = cast("dict[str, nn.Linear | nn.LayerNorm]", layer.parts)
            found += [(name, parts[part]) for part, name in layer_names(number).items()]
        return found

    def features(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Return the mean of the last layer over each text's tokens. [B, T], [B] -> [B, H]."""
        layout = Layout(lengths, tokens.shape[1])
        hidden = self.norm(self.words(layout.packed(tokens)) + self.places(layout.columns))
        hidden = dropped(hidden, training=self.training)
        for layer in self.layers:
            hidden = layer(hidden, layout)
        mean: Tensor = layout.padded(hidden).sum(1) / lengths[:, None]
        return mean

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Return the logits. [B, T], [B] -> [B, K]."""
        logits: Tensor = self.head(dropped(self.features(tokens, lengths), training=self.training))
        return logits


def fitted_weights(model: Classifier, encoder: BaseEncoder) -> dict[str, Array]:
    """Return the checkpoint's tensors after fitting."""
    weights = dict(encoder.weights)
    for name, module in model.named_parts():
        weights[f"{name}.weight"] = module.weight.detach().numpy().astype(np.float32)
        weights[f"{name}.bias"] = module.bias.detach().numpy().astype(np.float32)
    weights["embeddings.word_embeddings.weight"] = model.words.weight.detach().numpy().astype(np.float32)
    weights["embeddings.position_embeddings.weight"] = model.places.weight.detach().numpy().astype(np.float32)
    weights.pop("embeddings.token_type_embeddings.weight", None)  # added to the positions
    return weights
