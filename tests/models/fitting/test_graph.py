"""Three that must agree: the ONNX graph that is run, the torch encoder that is fitted, and transformers' BERT."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from sds.models.fitting import bert_graph
from sds.models.fitting.base import open_base
from sds.models.fitting.bert_graph import Head, encoder_graph
from sds.models.fitting.familiarity import Region
from sds.models.readers.onnx_form import check_onnx
from sds.models.readers.session import Session
from tests.models.readers.tiny import POSITIONS, VOCABULARY, WIDTH

torch = pytest.importorskip("torch")
TOKENS = [[2, 5, 9, 20, 11, 3], [2, 30, 3], [2, *range(4, 40), 3]]
DRAW = np.random.default_rng(5)
HEAD = Head(DRAW.standard_normal((3, WIDTH)).astype(np.float32), DRAW.standard_normal(3).astype(np.float32))
REGION = Region(
    DRAW.standard_normal(WIDTH).astype(np.float32),
    np.linalg.qr(DRAW.standard_normal((WIDTH, 4)))[0].astype(np.float32),
    np.array([3.0, 2.0, 1.0, -0.5], np.float32),
    0.5,
)


def as_onnx(base: Path, tokens: list[int], head: Head = HEAD) -> list[np.ndarray]:
    session = Session(encoder_graph(open_base(base), head, REGION, tokens_max=POSITIONS))
    return list(session.run(["features", "logits", "middle", "distance"], {"tokens": np.array(tokens, np.int64)}))


def as_torch(base: Path) -> list[np.ndarray]:
    from sds.models.fitting.bert_torch import Classifier
    from sds.models.fitting.encoder_tuning import padded

    model = Classifier(open_base(base), 3).eval()
    with torch.no_grad():
        return list(model.features(*padded(TOKENS)).numpy())


def test_the_torch_encoder_is_bert_whatever_stands_beside_a_text(base: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.BertModel.from_pretrained(base, add_pooling_layer=False).eval()
    with torch.no_grad():
        expected = [model(torch.tensor([tokens])).last_hidden_state[0].mean(0).numpy() for tokens in TOKENS]
    for one, other in zip(expected, as_torch(base), strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def test_the_graph_of_finer_steps_is_the_torch_encoder(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left is the rounding of what flows between the maps, to eight bits."""
    monkeypatch.setattr(bert_graph, "STEPS", 127)
    for tokens, expected in zip(TOKENS, as_torch(base), strict=True):
        features, *_ = as_onnx(base, tokens)
        assert np.abs(features - expected).max() < 0.05 * np.abs(expected).max()


def test_seven_bits_cost_little(base: Path) -> None:
    for tokens, expected in zip(TOKENS, as_torch(base), strict=True):
        features, *_ = as_onnx(base, tokens)
        assert np.dot(features, expected) / np.linalg.norm(features) / np.linalg.norm(expected) > 0.995


def test_the_head_reads_the_last_layer_and_the_distance_the_middle_one(base: Path) -> None:
    features, logits, middle, distance = as_onnx(base, TOKENS[0])
    assert features @ HEAD.weight.T + HEAD.bias == pytest.approx(logits, abs=1e-4)
    apart = middle - REGION.centre
    expected = REGION.weights @ (apart @ REGION.directions) ** 2 + REGION.rest * (apart @ apart)
    assert expected == pytest.approx(distance.item(), rel=1e-4)
    assert np.abs(middle - features).max() > 0.1


def test_what_smoothed_labels_left_each_value_is_taken_back(base: Path) -> None:
    """One that gives the likeliest of three values all that the smoothing left it is certain; the order of values stays."""
    taken = as_onnx(base, TOKENS[0], replace(HEAD, smoothing=0.3))[1]
    smoothed = np.exp(as_onnx(base, TOKENS[0])[1])
    expected = np.maximum((smoothed / smoothed.sum() - 0.1) / 0.7, bert_graph.SHARE_MIN)
    assert expected == pytest.approx(np.exp(taken), rel=1e-4)
    certain = Head(np.zeros((3, WIDTH), np.float32), np.log(np.array([0.8, 0.1, 0.1], np.float32)), 0.3)
    assert [1, 1e-3, 1e-3] == pytest.approx(np.exp(as_onnx(base, TOKENS[0], certain)[1]), rel=1e-3)


def test_no_product_of_neighbours_overflows_sixteen_bits(base: Path) -> None:
    """Two bytes times two weights: some processors add them in 16 bits, and would cut what is larger."""
    model = onnx.load_from_string(encoder_graph(open_base(base), HEAD, REGION, tokens_max=POSITIONS))
    products = {node.input[1] for node in model.graph.node if node.op_type == "MatMulInteger"}
    weights = [onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer if tensor.name in products]
    assert len(weights) == 8
    assert all(2 * 255 * int(np.abs(weight.astype(int)).max()) < 1 << 15 for weight in weights)


def test_the_graph_is_standard_and_the_same_each_time(base: Path) -> None:
    first, second = (encoder_graph(open_base(base), HEAD, REGION, tokens_max=POSITIONS) for _ in range(2))
    check_onnx(first)
    assert first == second


def test_an_encoder_without_segments_is_written_too(base: Path) -> None:
    encoder = open_base(base)
    bare = replace(
        encoder, weights={name: value for name, value in encoder.weights.items() if "token_type" not in name}
    )
    session = Session(encoder_graph(bare, HEAD, REGION, tokens_max=POSITIONS))
    assert (3,) == session.run(["logits"], {"tokens": np.array([2, len(VOCABULARY) - 1, 3], np.int64)})[0].shape
