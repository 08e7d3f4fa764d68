"""Labels: what people read beside the path of a field, and nobody else."""

from __future__ import annotations

import pytest

from sds.kernel.contract.human_terms import human_contract
from sds.kernel.contract.schema import Contract
from sds.kernel.decision.packet import static_text
from sds.kernel.errors import ContractError
from tests.kernel.durable import contract, usual_contract

LEFT, MOOD = "ticket.refundable_minor", "ticket.mood"


def labelled(**labels: str) -> Contract:
    given = ", ".join(f'ticket.{name}: "{label}"' for name, label in labels.items())
    return contract(more=f"\nlabels: {{{given}}}\n")


def test_a_label_in_any_script_is_for_people_and_no_text_of_the_model_has_it() -> None:
    made = labelled(refundable_minor="Noch zu erstatten (€)", mood="مزاج")
    assert {LEFT: "Noch zu erstatten (€)", MOOD: "مزاج"} == made.labels == human_contract(made).labels
    assert static_text(usual_contract(), ()) == static_text(made, ())


def test_a_contract_without_labels_is_written_and_hashed_as_before_there_were_any() -> None:
    assert "labels" not in usual_contract().written
    assert usual_contract().hash == usual_contract().model_copy(update={"labels": {}}).hash
    assert usual_contract().hash != labelled(mood="Mood").hash


@pytest.mark.parametrize("label", ["", " Mood", "Mood ", "x" * 65, "Mo\u3164od", "Mo\tod", "Mo\\u202eod"])
def test_a_label_that_cannot_be_read_is_refused(label: str) -> None:
    with pytest.raises(ContractError):
        labelled(mood=label)


def test_a_label_of_no_field_and_one_of_two_fields_are_refused() -> None:
    with pytest.raises(ContractError, match=r"`ticket\.smell` is not a declared snapshot field"):
        labelled(smell="Smell")
    with pytest.raises(ContractError, match=rf"labels\.{LEFT}.*has the label of `{MOOD}`"):
        labelled(mood="Left", refundable_minor="LEFT")
