"""Random contracts: a few fields, a few kinds, conditions and bounds that often meet and sometimes exclude each other."""

from __future__ import annotations

from random import Random

from sds.kernel.contract.schema import Contract
from tests.strategies import KINDS, REASONS, some_of

_FIELDS = {"a.b": "bool", "a.c": "bool", "a.n": "int", "a.m": "fixed(2)", "a.e": "enum(rain, snow)", "a.s": "string"}


def random_contract(rng: Random) -> Contract:
    names = rng.sample(KINDS, rng.randint(1, 4))
    kinds = {name: _kind(rng) for name in names}
    refusal = "BLOCK" if len(names) == 4 else "DENY"  # without a draw: each seed has its contract
    kinds[refusal] = {"reasons": ("NO",)}
    return Contract.model_validate(
        {
            "gate": "random",
            "agent_id": "random-agent",
            "version": "1.0.0",
            "owner": "random@example",
            "effective_from": "2020-01-01",
            "mission": "Decide.",
            "authority": (*names, refusal),
            "refusal": refusal,
            "event": {"id": "id", "key": "key"},
            "snapshot": _FIELDS,
            "when": _condition(rng, 1),
            "kinds": kinds,
            "spend": ({"name": "day", "window": "day", "max_minor": rng.choice((50, 100_000))},) * rng.randrange(2),
        }
    )


def mutated_contract(rng: Random, contract: Contract) -> Contract:
    """Return the contract with one thing changed: a condition, a bound, the reasons, the authority or a limit."""
    data = contract.model_dump()
    name = rng.choice([kind for kind in data["kinds"] if kind != contract.refusal])
    kind = data["kinds"][name]
    match rng.randrange(6):
        case 0:
            data["when"] = f"({data['when']}) {rng.choice(('&&', '||'))} ({_condition(rng, 0)})"
        case 1:
            kind["when"] = f"({kind['when']}) {rng.choice(('&&', '||'))} ({_condition(rng, 0)})"
        case 2 if kind["params"]:
            param = rng.choice(sorted(kind["params"]))
            end = rng.choice(("lo", "hi"))
            kind["params"][param][end] = f"{kind['params'][param][end]} {rng.choice('+-')} {rng.randint(1, 5)}"
        case 3 if len(data["authority"]) > 2:
            data["authority"] = tuple(each for each in data["authority"] if each != name)
        case 4:
            kind["reasons"] = some_of(rng.randint, REASONS) or ("A",)
        case _:
            data["kinds"][name] = {**_kind(rng), "reasons": kind["reasons"]}
    return Contract.model_validate(data)


def _kind(rng: Random) -> dict[str, object]:
    kind: dict[str, object] = {"reasons": some_of(rng.randint, REASONS) or ("A",), "when": _condition(rng, 2)}
    if rng.randrange(3):
        step = rng.choice((1, 1, 5, 10))
        kind["params"] = {"amount": {"lo": _number(rng), "hi": _number(rng), "scale": 2, "step": step}}
        kind |= rng.choice(({}, {"draws": {"a.m": "amount"}, "spends": "amount"}))
    elif rng.randrange(2):
        kind |= {"fills": {"fixed": {"value": _number(rng), "scale": 2}}, "spends": "fixed"}
    return kind


def _number(rng: Random) -> str:
    field = rng.choice(("a.n", "a.m"))
    plain = rng.choice((str(rng.randint(0, 60)), field, f"min({rng.randint(1, 90)}, {field})", f"{field} / 2"))
    return plain if rng.randrange(4) else f"(a.b ? {plain} : {rng.randint(0, 60)})"


def _condition(rng: Random, depth: int) -> str:
    if not depth or not rng.randrange(3):
        number = f"{rng.choice(('a.n', 'a.m'))} {rng.choice(('<', '<=', '>', '>=', '==', '!='))} {rng.randint(-3, 60)}"
        word = rng.choice(('a.e == "rain"', 'a.e != "snow"', 'a.s == "x"', "a.b", "!a.c", "a.n < a.m", "true"))
        return number if rng.randrange(2) else word
    joined = rng.choice((" && ", " && ", " || "))
    return joined.join(f"({_condition(rng, depth - 1)})" for _ in range(rng.randint(2, 3)))
