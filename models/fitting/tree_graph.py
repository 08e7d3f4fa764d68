"""Boosted trees as one ONNX graph of one standard operator: row [N, F] -> logit [N, 1].

scikit-learn has no public access to its trees, so they are taken from its internals; a test compares the outputs of both.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper
from sklearn.ensemble import HistGradientBoostingClassifier

OPSETS = (("", 20), ("ai.onnx.ml", 3))
IR_VERSION = 10


def tree_graph(trees: HistGradientBoostingClassifier, width: int) -> bytes:
    """Return fitted trees over `width` numbers, without missing numbers or categories, for two classes, as an ONNX model."""
    columns: dict[str, Any] = {}
    for number, (tree,) in enumerate(trees._predictors):  # noqa: SLF001
        for name, cells in _columns(number, tree.nodes).items():
            columns.setdefault(name, []).extend(cells)
    base = float(np.ravel(trees._baseline_prediction)[0])  # noqa: SLF001
    node = helper.make_node(
        "TreeEnsembleRegressor", ["row"], ["logit"], domain="ai.onnx.ml", n_targets=1, base_values=[base], **columns
    )
    inputs = [helper.make_tensor_value_info("row", TensorProto.FLOAT, ["N", width])]
    outputs = [helper.make_tensor_value_info("logit", TensorProto.FLOAT, ["N", 1])]
    opsets = [helper.make_opsetid(domain, version) for domain, version in OPSETS]
    model = helper.make_model(
        helper.make_graph([node], "reader", inputs, outputs), opset_imports=opsets, ir_version=IR_VERSION
    )
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString(deterministic=True))


def _columns(number: int, nodes: Any) -> dict[str, list[Any]]:
    """Return the operator's attributes for one tree. A number goes left where it is at most the node's."""
    leaf = nodes["is_leaf"].astype(bool)
    places = np.flatnonzero(leaf).tolist()
    return {
        "nodes_treeids": [number] * len(nodes),
        "nodes_nodeids": list(range(len(nodes))),
        "nodes_modes": ["LEAF" if end else "BRANCH_LEQ" for end in leaf],
        "nodes_featureids": np.where(leaf, 0, nodes["feature_idx"]).astype(int).tolist(),
        "nodes_values": rounded_down(np.where(leaf, 0.0, nodes["num_threshold"])).tolist(),
        "nodes_truenodeids": np.where(leaf, 0, nodes["left"]).astype(int).tolist(),
        "nodes_falsenodeids": np.where(leaf, 0, nodes["right"]).astype(int).tolist(),
        "target_treeids": [number] * len(places),
        "target_nodeids": places,
        "target_ids": [0] * len(places),
        "target_weights": nodes["value"][places].astype(float).tolist(),
    }


def rounded_down(numbers: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return for each number the greatest 32-bit number that is not above it, so that no 32-bit number changes sides."""
    nearest = numbers.astype(np.float32)
    return np.where(nearest > numbers, np.nextafter(nearest, np.float32(-np.inf)), nearest)
