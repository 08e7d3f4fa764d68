"""Fitting a reader of texts: the head alone, and the whole encoder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sds.models.fitting.encoder_head import fit_head
from sds.models.fitting.fitted import FittedText
from sds.models.readers.opening import open_reader
from sds.models.readers.protocol import Reader, ReaderError
from tests.models.readers.tiny import NAMES, claims

torch = pytest.importorskip("torch")
TRAIN, HELD_OUT, TEST = claims(180, seed=11), claims(90, seed=12), claims(90, seed=13)
EPOCHS = 20


def fit_encoder(*args: Any, **options: Any) -> FittedText:
    from sds.models.fitting import encoder_tuning

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(encoder_tuning, "RATE", 3e-3)  # a tiny encoder learns faster
        patched.setattr(encoder_tuning, "THREADS", 1)  # and is quicker with one thread, where tests run side by side
        return encoder_tuning.fit_encoder(*args, **options)


@pytest.fixture(scope="module")
def tuned(base: Path) -> FittedText:
    return fit_encoder(*TRAIN, names=NAMES, base=base, epochs=EPOCHS).calibrated(*HELD_OUT)


def accuracy(reader: Reader, texts: list[str], values: list[str]) -> float:
    readings = [reader.read(text).probabilities for text in texts]
    return float(
        np.mean([max(shares, key=shares.__getitem__) == value for shares, value in zip(readings, values, strict=True)])
    )


def test_a_tuned_encoder_reads_unseen_texts(tuned: FittedText, tmp_path: Path) -> None:
    sha256 = tuned.export(tmp_path / "cause")
    reader = open_reader(tmp_path / "cause", sha256=sha256)
    assert ("encoder", NAMES) == (reader.kind, reader.values)
    assert accuracy(reader, *TEST) >= 0.95


def test_the_same_seed_gives_the_same_scores(tuned: FittedText, base: Path) -> None:
    again = fit_encoder(*TRAIN, names=NAMES, base=base, epochs=EPOCHS).calibrated(*HELD_OUT)
    for text in TEST[0][:20]:
        one, other = tuned.reader().read(text).probabilities, again.reader().read(text).probabilities
        assert list(one.values()) == pytest.approx(list(other.values()), abs=0.01)


def test_another_seed_gives_another_fit(tuned: FittedText, base: Path) -> None:
    other = fit_encoder(*TRAIN, names=NAMES, base=base, epochs=1, seed=2)
    assert tuned.files["model.onnx"] != other.files["model.onnx"]


def test_fitting_leaves_torch_as_it_was(base: Path) -> None:
    torch.manual_seed(7)
    expected, threads = torch.rand(3), torch.get_num_threads()
    torch.manual_seed(7)
    fit_encoder(*claims(12, seed=1), names=NAMES, base=base, epochs=1)
    assert torch.equal(expected, torch.rand(3))
    assert threads == torch.get_num_threads()


def test_of_many_texts_each_is_seen_less_often_and_in_the_first_epoch_once(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sds.models.fitting import encoder_tuning as tuning

    assert [2] * tuning.EPOCHS_MAX == tuning.copies_in(1)
    assert [2] * tuning.EPOCHS_MIN == tuning.copies_in(tuning.TEXTS_SEEN_MAX)
    for texts in range(1_700, 6_000, 100):
        copies = tuning.copies_in(texts)
        assert set(copies[1:]) == {2}
        assert 0 <= tuning.TEXTS_SEEN_MAX - sum(copies) * texts < texts
    monkeypatch.setattr(tuning, "TEXTS_SEEN_MAX", 7 * 40)
    told: list[str] = []
    fit_encoder(*claims(40, seed=1), names=NAMES, base=base, on_progress=lambda *step: told.append(step[2]))
    assert [f"epoch {epoch} of 4" for epoch in (1, 1, 2, 2, 3, 3, 4, 4)] == told


def test_progress_is_told_step_by_step(base: Path) -> None:
    told: list[tuple[int, int, str]] = []
    fit_encoder(*claims(40, seed=1), names=NAMES, base=base, epochs=2, on_progress=lambda *step: told.append(step))
    assert [(number, 4) for number in range(1, 5)] == [(done, total) for done, total, _ in told]
    assert "epoch 1 of 2" == told[0][2]
    heads: list[tuple[int, int, str]] = []
    fit_head(*claims(12, seed=1), names=NAMES, base=base, on_progress=lambda *step: heads.append(step))
    assert [0, 1, 2] == [done for done, _, _ in heads]


def test_probabilities_hold_on_texts_that_neither_fit_nor_calibration_saw(tuned: FittedText) -> None:
    """As sure as it is, so often is it right: the mean confidence is the accuracy, within what 90 texts can tell."""
    reader = tuned.reader()
    sure = [max(reader.read(text).probabilities.values()) for text in TEST[0]]
    assert abs(float(np.mean(sure)) - accuracy(reader, *TEST)) < 0.05


def test_nearly_all_unseen_texts_of_the_kind_are_familiar(tuned: FittedText) -> None:
    reader = tuned.reader()
    assert np.mean([reader.read(text).familiar for text in TEST[0]]) >= 0.9


def test_two_values_are_enough(base: Path) -> None:
    texts, values = claims(60, seed=1)
    pairs = [(text, value) for text, value in zip(texts, values, strict=True) if value != "technical"]
    ours, theirs = [text for text, _ in pairs], [value for _, value in pairs]
    reader = fit_head(ours, theirs, names=NAMES[:2], base=base).calibrated(ours, theirs).reader()
    assert accuracy(reader, ours, theirs) >= 0.9


def test_nothing_uncalibrated_is_written(base: Path, tmp_path: Path) -> None:
    fitted = fit_head(*claims(12, seed=1), names=NAMES, base=base)
    with pytest.raises(ReaderError, match="is not calibrated"):
        fitted.export(tmp_path / "cause")
    assert not (tmp_path / "cause").exists()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown value": ({"values": ["strike", *TRAIN[1][1:]]}, "the value `strike` is not declared"),
    "one value a text": ({"values": TRAIN[1][1:]}, "180 texts have 179 values"),
    "one class only": ({"values": ["crew"] * 180}, "the value `weather` has 0 texts"),
    "one text of a value": ({"texts": TRAIN[0][:4], "values": TRAIN[1][:4]}, "the value `crew` has 1 texts"),
    "one name": ({"names": ("crew",)}, "a reading has 2 to 32 different values"),
    "a name twice": ({"names": (*NAMES, "crew")}, "a reading has 2 to 32 different values"),
    "no texts": ({"texts": [], "values": []}, "the value `weather` has 0 texts"),
}


@pytest.mark.parametrize("fit", [fit_head, fit_encoder])
@pytest.mark.parametrize("refused", REFUSED)
def test_what_cannot_be_fitted_is_refused_before_any_work(
    refused: str, fit: Callable[..., FittedText], base: Path
) -> None:
    changes, expected = REFUSED[refused]
    options: dict[str, Any] = {"texts": TRAIN[0], "values": TRAIN[1], "names": NAMES, **changes}
    with pytest.raises(ReaderError) as raised:
        fit(options["texts"], options["values"], names=options["names"], base=base)
    assert expected == str(raised.value)


def test_ten_texts_are_too_few_to_calibrate(base: Path) -> None:
    fitted = fit_head(*claims(12, seed=1), names=NAMES, base=base)
    with pytest.raises(ReaderError, match="10 examples are too few to calibrate"):
        fitted.calibrated(TRAIN[0][:10], TRAIN[1][:10])
    with pytest.raises(ReaderError, match="`strike` is not declared"):
        fitted.calibrated(["late"], ["strike"])


def test_a_tenth_is_dropped_the_mean_stays_and_a_reader_drops_nothing() -> None:
    from sds.models.fitting.bert_torch import DROPPED_OF_256, dropped

    ones = torch.ones(301, 333)
    torch.manual_seed(5)
    once = dropped(ones, training=True)
    assert float((once == 0).double().mean()) == pytest.approx(DROPPED_OF_256 / 256, abs=0.005)
    assert float(once.double().mean()) == pytest.approx(1, abs=0.005)
    assert not torch.equal(once, dropped(ones, training=True))
    torch.manual_seed(5)
    assert torch.equal(once, dropped(ones, training=True))
    assert dropped(ones, training=False) is ones


def test_two_readings_are_apart_by_what_they_differ_in_either_way_round() -> None:
    from sds.models.fitting.encoder_tuning import apart

    one, other = torch.tensor([[2.0, 0.0, 1.0]]), torch.tensor([[0.0, 3.0, 1.0]])
    assert 0.0 == float(apart(torch.cat([one, one + 5])))
    p, q = one.softmax(-1), other.softmax(-1)
    expected = float(((p * (p / q).log()).sum() + (q * (q / p).log()).sum()) / 2)
    assert [expected, expected] == pytest.approx(
        [float(apart(torch.cat([one, other]))), float(apart(torch.cat([other, one])))]
    )
