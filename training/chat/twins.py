# ruff: noqa: E501 - forms of one meaning a line read better than wrapped ones
"""Facts that differ in one thing only, so that a question has to be read to its end."""

from random import Random

from chat import vocabulary as v
from chat.facts import Fact, pick
from chat.vocabulary import a


def colours(rng: Random, n: int) -> list[Fact]:
    """The same thing in the hands of several people."""
    thing = rng.choice(v.THINGS)
    who, hues = rng.sample(v.NAMES, n), rng.sample(v.COLOURS, n)
    return [
        Fact(
            "twins", f"{x} has {a(c)} {thing}.|{x}'s {thing} is {c}.|{x} has a {thing}, it is {c}.|{x} owns {a(c)} {thing}.|{x} got {a(c)} {thing}.|{x} bought {a(c)} {thing}.",
            ((f"What colour is {x}'s {thing}?|Which colour is {x}'s {thing}?|What is the colour of {x}'s {thing}?|What colour {thing} does {x} have?|Which {thing} does {x} have?|What colour is the {thing} of {x}?", f"{x}'s {thing} is {c}."),
             (f"Who has the {c} {thing}?|Whose {thing} is {c}?|Who has {a(c)} {thing}?|Who owns the {c} {thing}?|The {c} {thing} belongs to whom?|Who does the {c} {thing} belong to?", f"{x} has the {c} {thing}.")), c,
        )
        for x, c in zip(who, hues, strict=True)
    ]  # fmt: skip


def two_things(rng: Random, n: int) -> list[Fact]:
    """Several things of several colours, one owner or none."""
    things, hues = rng.sample(list(dict.fromkeys(v.THINGS)), n), rng.sample(v.COLOURS, n)
    who = rng.choice(v.NAMES)
    return [
        Fact(
            "twins", f"The {t} is {c}.|{who} has {a(c)} {t}.|{who}'s {t} is {c}.|My {t} is {c}.|There is {a(c)} {t}.",
            ((f"What colour is the {t}?|Which colour is the {t}?|What is the colour of the {t}?|What colour does the {t} have?", f"The {t} is {c}."),
             (f"What is {c}?|Which thing is {c}?|Which one is {c}?|What thing is {c}?", f"The {t} is {c}.")), c,
        )
        for t, c in zip(things, hues, strict=True)
    ]  # fmt: skip


def codes(rng: Random, n: int) -> list[Fact]:
    """Codes of several locks."""
    key = rng.choice(("code", "code", "password", "PIN", "number"))
    out = []
    for lock in rng.sample(v.LOCKED, n):
        x = "".join(rng.choices("0123456789", k=4)) if rng.random() < 0.8 else rng.choice(v.LABELS)
        out.append(
            Fact("twins", f"The {lock} {key} is {x}.|The {key} for the {lock} is {x}.|The {key} of the {lock} is {x}.|My {lock} {key} is {x}.",
                 ((f"What is the {lock} {key}?|What is the {key} for the {lock}?|What is the {key} of the {lock}?|Which {key} opens the {lock}?|Tell me the {lock} {key}.|What {key} does the {lock} have?|What is my {lock} {key}?", f"The {lock} {key} is {x}."),), x)
        )  # fmt: skip
    return out


def pets(rng: Random, n: int) -> list[Fact]:
    """Pets of one owner."""
    who, kinds, names = (
        rng.choice(v.NAMES),
        rng.sample(list(dict.fromkeys(v.PETS)), n),
        rng.sample(v.PET_NAMES, n),
    )
    return [
        Fact("twins", f"{who}'s {k} is called {x}.|{who} has {a(k)} called {x}.|The {k} is called {x}.|The name of {who}'s {k} is {x}.|{x} is {who}'s {k}.",
             ((f"What is the {k} called?|What is {who}'s {k} called?|What is the name of the {k}?|What is the name of {who}'s {k}?|Which name does the {k} have?", f"The {k} is called {x}."),
              (f"Which animal is {x}?|What kind of animal is {x}?|What is {x}?|Who is {x}?", f"{x} is {a(k)}.")), x)
        for k, x in zip(kinds, names, strict=True)
    ]  # fmt: skip


def people(rng: Random, n: int) -> list[Fact]:
    """One kind of fact about several people."""
    who = rng.sample(v.NAMES, n)
    kind = rng.choice(("town", "job", "age", "likes", "count", "day"))
    out = []
    things, pool = (
        rng.choice(v.COUNTABLE),
        {"town": v.TOWNS, "job": v.JOBS, "likes": v.FOODS, "day": v.DAYS}.get(kind),
    )
    values = (
        rng.sample(list(dict.fromkeys(pool)), n)
        if pool
        else [str(x) for x in rng.sample(range(2, 60 if kind == "age" else 21), n)]
    )
    for p, x in zip(who, values, strict=True):
        said, first, second, answer = {
            "town": (f"{p} lives in {x}.", f"Where does {p} live?|In which city does {p} live?|Which city does {p} live in?", f"Who lives in {x}?|Which of them lives in {x}?", f"{p} lives in {x}."),
            "job": (f"{p} is {a(x)}.|{p} works as {a(x)}.", f"What is {p}'s job?|What does {p} do?|What is {p}?", f"Who is the {x}?|Who is {a(x)}?|Who works as {a(x)}?|Which of them is {a(x)}?", f"{p} is {a(x)}."),
            "age": (f"{p} is {x} years old.|{p} is {x}.", f"How old is {p}?|What is {p}'s age?", f"Who is {x} years old?|Who is {x}?|Which of them is {x}?", f"{p} is {x} years old."),
            "likes": (f"{p} likes {x}.", f"What does {p} like?|What does {p} love?", f"Who likes {x}?|Which of them likes {x}?", f"{p} likes {x}."),
            "count": (f"{p} has {x} {things}.", f"How many {things} does {p} have?|How many {things} has {p}?", f"Who has {x} {things}?|Who has {x}?", f"{p} has {x} {things}."),
            "day": (f"{p} comes on {x}.", f"When does {p} come?|On which day does {p} come?", f"Who comes on {x}?|Who is coming on {x}?", f"{p} comes on {x}."),
        }[kind]  # fmt: skip
        out.append(Fact("twins", said, ((first, answer), (second, answer)), x))
    return out


def events(rng: Random, n: int) -> list[Fact]:
    """When several things are, or where."""
    if rng.random() < 0.5:
        return [
            Fact("twins", f"The {e} is on {d}.|Our {e} is on {d}.|My {e} is on {d}.", ((f"When is the {e}?|On which day is the {e}?|What day is the {e}?|Which day is the {e}?", f"The {e} is on {d}."), (f"What is on {d}?|Which event is on {d}?|What do I have on {d}?", f"The {e} is on {d}.")), d)
            for e, d in zip(rng.sample(v.EVENTS, n), rng.sample(v.DAYS, n), strict=True)
        ]  # fmt: skip
    out = []
    for t, s in zip(
        rng.sample(list(dict.fromkeys(v.THINGS)), n), rng.sample(list(v.SPOTS), n), strict=True
    ):
        at = f"{v.SPOTS[s]} the {s}"
        out.append(Fact("twins", f"The {t} is {at}.|I put the {t} {at}.|My {t} is {at}.", ((f"Where is the {t}?|Where did I put the {t}?|Where can I find the {t}?|Where is my {t}?", f"The {t} is {at}."), (f"What is {at}?|Which thing is {at}?", f"The {t} is {at}.")), s))  # fmt: skip
    return out


MAKERS = (colours, colours, two_things, codes, pets, people, people, people, events, events)


def twins(rng: Random) -> tuple[list[Fact], list[str]]:
    """Return two to four facts of one form, and how they are said, in order."""
    n = rng.choice((2, 2, 2, 3, 3, 4))
    facts = rng.choice(MAKERS)(rng, n)
    form = rng.randrange(6)  # mostly all in the same words
    said = [
        forms[form % len(forms)] if rng.random() < 0.8 else pick(rng, f.said)
        for f in facts
        for forms in (f.said.split("|"),)
    ]
    return facts, said
