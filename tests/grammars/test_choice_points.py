"""What a matcher offers at a point: the options that are still open, each under its label, until one is left."""

from __future__ import annotations

import re
from collections.abc import Iterator

from sds.grammars.tokens.compiler import GrammarCompiler
from sds.grammars.tokens.matcher import ChoicePoint, TokenMatcher
from sds.kernel.envelope.envelope import DENY, KindBound, bound, envelope_of
from tests.grammars.matchers import FEW, at_random, every_end, finished_by, pool, some, taken
from tests.grammars.tokenizers import Scraps, Tokens
from tests.model_fixtures import CONTEXT_REF
from tests.scale import scale

NUMBER = re.compile(rb"-?[0-9.]+")


def test_what_a_token_leaves_open_is_what_can_still_be_written(words: Tokens) -> None:
    compiler = GrammarCompiler(words)
    for envelope in FEW.values():
        for matcher, point, options in choice_points(compiler.matcher(envelope, CONTEXT_REF)):
            assert point.finite
            for token, labels in zip(point.tokens.tolist(), point.labels, strict=True):
                copied = matcher.copy()
                copied.accept(token)
                ends = {end.data for end in every_end(copied)}
                begun = {label for label in options if any(is_option(end, point.start, label) for end in ends)}
                assert begun == set(labels), (matcher.data, words.piece(token))


def is_option(data: bytes, start: int, label: str) -> bool:
    return data.startswith(label.encode(), start) and data[start + len(label) :][:1] in {b'"', b",", b"}"}


def choice_points(matcher: TokenMatcher) -> Iterator[tuple[TokenMatcher, ChoicePoint, set[str]]]:
    """Yield every choice point of a small language: the matcher at it, and all labels that are open."""
    matcher.accept_forced()
    if matcher.finished:
        return
    point = matcher.choice_point()
    yield matcher, point, {label for labels in point.labels for label in labels}
    for token in point.tokens.tolist():
        copied = matcher.copy()
        copied.accept(token)
        yield from choice_points(copied)


def test_the_labels_narrow_until_one_is_left(words: Tokens) -> None:
    for envelope in FEW.values():
        for matcher, point, _ in choice_points(GrammarCompiler(words).matcher(envelope, CONTEXT_REF)):
            for token, labels in zip(point.tokens.tolist(), point.labels, strict=True):
                copied = matcher.copy()
                copied.accept(token)
                copied.accept_forced()
                same = None if copied.finished else copied.choice_point()
                if same is not None and (same.choice, same.start) == (point.choice, point.start):
                    assert {*labels} == {label for each in same.labels for label in each}
                else:
                    assert len(labels) == 1, (copied.data, labels)


def test_the_alternatives_of_a_choice_are_all_its_options_and_none_begins_another(words: Tokens) -> None:
    for envelope in FEW.values():
        begun = dict[tuple[bytes, int], int]()
        for matcher, point, labels in choice_points(GrammarCompiler(words).matcher(envelope, CONTEXT_REF)):
            found = matcher.alternatives()
            key = (
                matcher.data[: point.start].rstrip(b'":'),
                point.start,
            )  # a sign may be chosen with what stands before it
            assert bool(found) == (key not in begun), matcher.data
            begun[key] = 1
            if not found:
                continue
            assert labels == {label for label, _ in found}
            assert len(found) == len(labels)
            spelled = [tokens for _, tokens in found]
            assert not any(a != b and a == b[: len(a)] for a in spelled for b in spelled)
            for label, tokens in found:
                copied = matcher.copy()
                for token in tokens:
                    copied.accept(token)
                assert copied.data.startswith(label.encode(), point.start)
                if not copied.finished:
                    copied.accept_forced()
                assert copied.finished or copied.choice_point().start != point.start


def test_a_wide_number_is_chosen_digit_by_digit(embedded: Tokens) -> None:
    matcher = GrammarCompiler(embedded).matcher(some(amount=bound(-5000, 25_000, scale=2)), CONTEXT_REF)
    taken(matcher, "PAY")
    point = matcher.choice_point()
    assert ("amount", False, len(matcher.data)) == (point.choice, point.finite, point.start)
    assert {*"0123456789-"} == {label for labels in point.labels for label in labels}
    assert () == matcher.alternatives()
    for digit in "25":
        matcher.accept(embedded.tokenize(digit.encode(), special=False)[0])
    assert {("0",), (".",)} == set(matcher.choice_point().labels)
    assert point.start == matcher.choice_point().start


def test_towards_a_number_lead_the_tokens_that_write_it(words: Tokens) -> None:
    compiler, met = GrammarCompiler(words), 0
    for rng, envelope in pool(20261122, scale(50, 5000)):
        matcher = compiler.matcher(envelope, CONTEXT_REF)
        matcher.accept_forced()
        while not matcher.finished:
            point = matcher.choice_point()
            if point.labels and not point.finite:
                end = finished_by(matcher.copy(), at_random(rng))
                number, begun = NUMBER.match(end.data, point.start), matcher.data[point.start :]
                assert number
                literal, tokens = number[0].decode(), matcher.tokens_for(number[0].decode())
                assert [*tokens] == end.tokens[len(matcher.tokens) :][: len(tokens)]
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
                    written = matcher.copy()
                    for token in matcher.tokens_for(shown):
                        written.accept(token)
                    assert written.data in {matcher.data, matcher.data[: point.start] + shown.encode()}
            matcher.accept(int(rng.choice(point.tokens.tolist())))
            matcher.accept_forced()
    assert met > scale(50, 5000)


def test_a_whole_number_says_where_it_ends(embedded: Tokens) -> None:
    matcher = GrammarCompiler(embedded).matcher(some(amount=bound(1, 900)), CONTEXT_REF)
    taken(matcher, "PAY")
    matcher.accept(embedded.tokenize(b"9", special=False)[0])
    assert {*((str(n),) for n in range(10)), ("",)} == set(matcher.choice_point().labels)


def test_one_value_is_no_choice_where_tokens_part_over_what_comes_after_it() -> None:
    """Where one token holds the next number's sign, they part behind a number that was forced."""
    only, signed = bound(7, 7), bound(-1, 1)
    assert only is not None
    assert signed is not None
    kinds = [KindBound(DENY, ("NO",)), KindBound("PAY", ("YES",), (("a", only), ("b", signed)))]
    matcher = GrammarCompiler(Tokens(Scraps((',"b":-',), parts=False))).matcher(envelope_of(kinds), "0" * 64)
    matcher.accept_forced()
    matcher.accept(ord("P"))
    matcher.accept_forced()
    assert matcher.data.endswith(b'"a":7')
    assert 2 == len(matcher.choice_point().tokens)
    assert () == matcher.alternatives()
