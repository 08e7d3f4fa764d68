"""What a walk offers at a fork: the options that are still open, each under its label, until one is left."""

from __future__ import annotations

import re
from collections.abc import Iterator

from sds.grammars.tokens.compiler import ChoicePoint, GrammarCompiler, TokenMatcher
from sds.kernel.envelope.bounds import bound
from sds.kernel.envelope.envelope import DENY, KindBound, envelope_of
from tests.grammars.tokenizers import Scraps, Tokens
from tests.grammars.walks import FEW, at_random, every_end, pool, some, taken, walked
from tests.model_fixtures import CONTEXT_REF
from tests.scale import scale

NUMBER = re.compile(rb"-?[0-9.]+")


def test_what_a_token_leaves_open_is_what_can_still_be_written(words: Tokens) -> None:
    planner = GrammarCompiler(words)
    for envelope in FEW.values():
        for walk, fork, options in forks(planner.walk(envelope, CONTEXT_REF)):
            assert fork.finite
            for token, labels in zip(fork.tokens.tolist(), fork.labels, strict=True):
                copied = walk.copy()
                copied.take(token)
                ends = {end.data for end in every_end(copied)}
                begun = {label for label in options if any(is_option(end, fork.start, label) for end in ends)}
                assert begun == set(labels), (walk.data, words.piece(token))


def is_option(data: bytes, start: int, label: str) -> bool:
    return data.startswith(label.encode(), start) and data[start + len(label) :][:1] in {b'"', b",", b"}"}


def forks(walk: TokenMatcher) -> Iterator[tuple[TokenMatcher, ChoicePoint, set[str]]]:
    """Yield every fork of a small language: the walk at it, and all labels that are open."""
    walk.forced()
    if walk.finished:
        return
    fork = walk.fork()
    yield walk, fork, {label for labels in fork.labels for label in labels}
    for token in fork.tokens.tolist():
        copied = walk.copy()
        copied.take(token)
        yield from forks(copied)


def test_the_labels_narrow_until_one_is_left(words: Tokens) -> None:
    for envelope in FEW.values():
        for walk, fork, _ in forks(GrammarCompiler(words).walk(envelope, CONTEXT_REF)):
            for token, labels in zip(fork.tokens.tolist(), fork.labels, strict=True):
                copied = walk.copy()
                copied.take(token)
                copied.forced()
                same = None if copied.finished else copied.fork()
                if same is not None and (same.choice, same.start) == (fork.choice, fork.start):
                    assert {*labels} == {label for each in same.labels for label in each}
                else:
                    assert len(labels) == 1, (copied.data, labels)


def test_the_alternatives_of_a_choice_are_all_its_options_and_none_begins_another(words: Tokens) -> None:
    for envelope in FEW.values():
        begun = dict[tuple[bytes, int], int]()
        for walk, fork, labels in forks(GrammarCompiler(words).walk(envelope, CONTEXT_REF)):
            found = walk.alternatives()
            key = (walk.data[: fork.start].rstrip(b'":'), fork.start)  # a sign may be chosen with what stands before it
            assert bool(found) == (key not in begun), walk.data
            begun[key] = 1
            if not found:
                continue
            assert labels == {label for label, _ in found}
            assert len(found) == len(labels)
            spelled = [tokens for _, tokens in found]
            assert not any(a != b and a == b[: len(a)] for a in spelled for b in spelled)
            for label, tokens in found:
                copied = walk.copy()
                for token in tokens:
                    copied.take(token)
                assert copied.data.startswith(label.encode(), fork.start)
                if not copied.finished:
                    copied.forced()
                assert copied.finished or copied.fork().start != fork.start


def test_a_wide_number_is_chosen_digit_by_digit(embedded: Tokens) -> None:
    walk = GrammarCompiler(embedded).walk(some(amount=bound(-5000, 25_000, scale=2)), CONTEXT_REF)
    taken(walk, "PAY")
    fork = walk.fork()
    assert ("amount", False, len(walk.data)) == (fork.choice, fork.finite, fork.start)
    assert {*"0123456789-"} == {label for labels in fork.labels for label in labels}
    assert () == walk.alternatives()
    for digit in "25":
        walk.take(embedded.tokenize(digit.encode(), special=False)[0])
    assert {("0",), (".",)} == set(walk.fork().labels)
    assert fork.start == walk.fork().start


def test_towards_a_number_lead_the_tokens_that_write_it(words: Tokens) -> None:
    planner, met = GrammarCompiler(words), 0
    for rng, envelope in pool(20261122, scale(150, 5000)):
        walk = planner.walk(envelope, CONTEXT_REF)
        walk.forced()
        while not walk.finished:
            fork = walk.fork()
            if fork.labels and not fork.finite:
                end = walked(walk.copy(), at_random(rng))
                number, begun = NUMBER.match(end.data, fork.start), walk.data[fork.start :]
                assert number
                literal, tokens = number[0].decode(), walk.towards(number[0].decode())
                assert [*tokens] == end.tokens[len(walk.tokens) :][: len(tokens)]
                assert bool(tokens) or begun in {b"", number[0]}  # a sign that is open, or nothing
                met += bool(tokens)
                other = literal[:-1] + str(rng.randint(0, 9))
                for shown in (
                    literal,
                    other,
                    f"{other}1",
                    f"-{literal}",
                    f" {literal}",
                    literal[:-1],
                    f"{literal}.0",
                    "",
                ):
                    written = walk.copy()
                    for token in walk.towards(shown):
                        written.take(token)
                    assert written.data in {walk.data, walk.data[: fork.start] + shown.encode()}
            walk.take(int(rng.choice(fork.tokens.tolist())))
            walk.forced()
    assert met > scale(150, 5000)


def test_a_whole_number_says_where_it_ends(embedded: Tokens) -> None:
    walk = GrammarCompiler(embedded).walk(some(amount=bound(1, 900)), CONTEXT_REF)
    taken(walk, "PAY")
    walk.take(embedded.tokenize(b"9", special=False)[0])
    assert {*((str(n),) for n in range(10)), ("",)} == set(walk.fork().labels)


def test_one_value_is_no_choice_where_tokens_part_over_what_comes_after_it() -> None:
    """Where one token holds the next number's sign, they part behind a number that was forced."""
    only, signed = bound(7, 7), bound(-1, 1)
    assert only is not None
    assert signed is not None
    kinds = [KindBound(DENY, ("NO",)), KindBound("PAY", ("YES",), (("a", only), ("b", signed)))]
    walk = GrammarCompiler(Tokens(Scraps((',"b":-',), parts=False))).walk(envelope_of(kinds), "0" * 64)
    walk.forced()
    walk.take(ord("P"))
    walk.forced()
    assert walk.data.endswith(b'"a":7')
    assert 2 == len(walk.fork().tokens)
    assert () == walk.alternatives()
