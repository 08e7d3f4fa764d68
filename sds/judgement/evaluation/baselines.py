"""The baselines that fitted readers are compared with. Each is a reader itself, so the same policy applies to what it reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec

from sds.definitions.definition import LabelledCase
from sds.judgement.asking import Probabilities
from sds.judgement.fitting import SEED
from sds.kernel.contract.schema import Contract
from sds.kernel.envelope.envelope import ESCALATE, DecisionEnvelope
from sds.kernel.errors import UsageError
from sds.models.protocol import extra_hint
from sds.models.readers.protocol import Reader
from sds.policy.readers import as_read

NO_SKLEARN = "scikit-learn is not installed (extra `fit`): the baselines of TF-IDF and boosting are not measured"


def majority(contract: Contract, learned: Sequence[LabelledCase], name: str) -> Reader:
    """Return a reader that gives every text the shares of the learned texts."""
    values = tuple(contract.readings[name].values)
    counts = Counter(case.readings[name] for case in learned)
    shares = {value: (counts[value] + 1) / (counts.total() + len(values)) for value in values}
    return Probabilities("majority", values, lambda _: shares)


def tfidf(contract: Contract, learned: Sequence[LabelledCase], name: str) -> Reader:
    """Return a reader of TF-IDF over words and characters with logistic regression. Raises UsageError without scikit-learn."""
    if find_spec("sklearn") is None:
        raise UsageError(NO_SKLEARN, hint=extra_hint("fit"))
    from sklearn.feature_extraction.text import TfidfVectorizer  # noqa: PLC0415  an extra
    from sklearn.linear_model import LogisticRegression  # noqa: PLC0415
    from sklearn.pipeline import make_pipeline, make_union  # noqa: PLC0415

    words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    chars = TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 5), sublinear_tf=True)
    model = make_pipeline(make_union(words, chars), LogisticRegression(C=10.0, max_iter=2000, random_state=SEED))
    model.fit([as_read(contract, case.text) for case in learned], [case.readings[name] for case in learned])
    known = [str(each) for each in model.classes_]

    def of(text: str) -> dict[str, float]:
        found = dict(zip(known, map(float, model.predict_proba([text])[0]), strict=True))
        return {value: found.get(value, 0.0) for value in contract.readings[name].values}

    return Probabilities("tfidf", tuple(contract.readings[name].values), of)


def always_pay(contract: Contract, envelope: DecisionEnvelope) -> str:
    """Return the first kind of `authority`, the refusal aside, that an envelope permits; else the refusal, else ESCALATE."""
    order = [*(kind for kind in contract.authority if kind != contract.refusal), contract.refusal]
    return next((kind for kind in order if envelope.kind(kind) is not None), ESCALATE)
