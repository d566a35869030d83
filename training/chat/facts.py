# ruff: noqa: E501 - forms of one meaning a line read better than wrapped ones
"""Facts that a user tells: how they are said, what is asked, and what is right."""

from dataclasses import dataclass
from random import Random

from chat import vocabulary as v
from chat.vocabulary import a


def pick(rng: Random, forms: str) -> str:
    """Return one of several forms, which are written with bars between them."""
    return rng.choice(forms.split("|"))


@dataclass(frozen=True)
class Fact:
    """One fact. said and each question: forms with bars between them.

    asked: pairs of (questions, answer). checked: (questions with {} for a value, the sentence that is true, its value, others);
    value: what stands for the fact in one word. changed: what corrects it, another fact or None.
    """

    kind: str
    said: str
    asked: tuple[tuple[str, str], ...]
    value: str
    checked: tuple[str, str, str, tuple[str, ...]] | None = None
    changed: "Fact | None" = None


def others(rng: Random, values, but: str, n: int = 3) -> tuple[str, ...]:
    return tuple(rng.sample([x for x in dict.fromkeys(values) if x != but], n))


def owned(rng: Random, who: str, thing: str, colour: str, deep: bool = True) -> Fact:
    """WHO has a COLOUR THING."""
    changed = None
    if deep:
        new = rng.choice([c for c in v.COLOURS if c != colour])
        changed = Fact(
            "colour",
            f"No, the {thing} is {new}.|Sorry, the {thing} is {new}, not {colour}.|Wait, {who}'s {thing} is {new}."
            f"|{who} painted the {thing} {new}.|Actually, the {thing} is {new}.|I was wrong, the {thing} is {new}."
            f"|Correction: the {thing} is {new}.",
            ((f"What colour is the {thing}?|What colour is the {thing} now?|So what colour is the {thing}?"
              f"|What colour is {who}'s {thing}?", f"The {thing} is {new}."),), new,
        )  # fmt: skip
    return Fact(
        "colour",
        f"{who} has {a(colour)} {thing}.|{who}'s {thing} is {colour}.|{who} owns {a(colour)} {thing}.|{who} bought {a(colour)} {thing}."
        f"|{who} has {a(colour)} {thing}.|{who} got {a(colour)} {thing}.|{who} found {a(colour)} {thing}.|The {thing} of {who} is {colour}."
        f"|There is {a(colour)} {thing} that belongs to {who}.|My friend {who} has {a(colour)} {thing}.|The {thing} that {who} has is {colour}.|{who} likes the {colour} {thing} very much.|The {colour} {thing} is {who}'s.|Look at {who}'s {colour} {thing}.|{who} came with {a(colour)} {thing}.|This is {who}'s {thing}, it is {colour}.",
        (
            (f"What colour is the {thing}?|What colour is {who}'s {thing}?|Which colour is the {thing}?|What is the colour of the {thing}?"
             f"|What is the colour of {who}'s {thing}?|What colour is the {thing} of {who}?|What colour does the {thing} have?"
             f"|Tell me the colour of the {thing}.|The {thing} is what colour?|Which colour does {who}'s {thing} have?"
             f"|What colour was the {thing}?|Do you know what colour the {thing} is?|Can you tell me the colour of the {thing}?",
             f"The {thing} is {colour}."),
            (f"Who has the {thing}?|Who has {a(colour)} {thing}?|Who owns the {thing}?|Whose {thing} is {colour}?|Whose is the {thing}?"
             f"|Who has the {colour} {thing}?|Who does the {thing} belong to?|Who is the owner of the {thing}?|Tell me who has the {thing}.",
             f"{who} has the {thing}."),
            (f"What does {who} have?|What has {who} got?|What does {who} own?|What is it that {who} has?|Tell me what {who} has.",
             f"{who} has {a(colour)} {thing}."),
        ),
        colour,
        (f"Is the {thing} {{}}?|Is {who}'s {thing} {{}}?|Does {who} have a {{}} {thing}?", f"the {thing} is {colour}", colour,
         others(rng, v.COLOURS, colour)),
        changed,
    )  # fmt: skip


def colour(rng: Random, deep: bool = True) -> Fact:
    hue = rng.choice(v.COLOURS if rng.random() < 0.85 else v.MORE_COLOURS)
    return owned(rng, rng.choice(v.NAMES), rng.choice(v.THINGS), hue, deep)


def place(rng: Random, deep: bool = True) -> Fact:
    many = rng.random() < 0.35
    thing = rng.choice(v.PLURAL_THINGS if many else v.THINGS)
    who, spot = rng.choice(v.NAMES), rng.choice(tuple(v.SPOTS))
    at, be, was, it = (
        f"{v.SPOTS[spot]} the {spot}",
        ("is", "are")[many],
        ("was", "were")[many],
        ("it", "them")[many],
    )
    changed = None
    if deep:
        new = rng.choice([s for s in v.SPOTS if s != spot])
        now = f"{v.SPOTS[new]} the {new}"
        changed = Fact(
            "place",
            f"No, the {thing} {be} {now}.|{who} moved the {thing}. Now the {thing} {be} {now}.|Sorry, the {thing} {be} {now}."
            f"|Actually, the {thing} {be} {now}.|Then {who} put the {thing} {now}.|Wait, I put {it} {now}.",
            ((f"Where {be} the {thing}?|Where {be} the {thing} now?|So where {be} the {thing}?", f"The {thing} {be} {now}."),), new,
        )  # fmt: skip
    return Fact(
        "place",
        f"The {thing} {be} {at}.|{who} put the {thing} {at}.|I put the {thing} {at}.|I left the {thing} {at}.|{who} left the {thing} {at}."
        f"|{who} hid the {thing} {at}.|We keep the {thing} {at}.|My {thing} {be} {at}.|You can find the {thing} {at}."
        f"|{who} keeps the {thing} {at}.|{who} placed the {thing} {at}.|The {thing} {was} {at}.|The {thing} {be} always {at}.|You will see the {thing} {at}.|I saw the {thing} {at}.|The {thing} that {who} bought {be} {at}.|The {thing} should be {at}.|{at.capitalize()} {be} the {thing}.",
        (
            (f"Where {be} the {thing}?|Where {be} the {thing} now?|Where can I find the {thing}?|Where did {who} put the {thing}?"
             f"|Where did I put the {thing}?|Where did I leave the {thing}?|Where {be} my {thing}?|Tell me where the {thing} {be}."
             f"|Do you know where the {thing} {be}?|Where should I look for the {thing}?|In which place {be} the {thing}?"
             f"|Can you tell me where the {thing} {be}?|Where {was} the {thing}?|I need the {thing}. Where {be} {'they' if many else 'it'}?",
             f"The {thing} {be} {at}."),
            (f"What is {at}?|What can I find {at}?|What did I put {at}?|Which thing is {at}?", f"The {thing} {be} {at}."),
        ),
        spot,
        (f"{be.capitalize()} the {thing} {{}}?", f"the {thing} {be} {at}", at,
         tuple(f"{v.SPOTS[s]} the {s}" for s in others(rng, v.SPOTS, spot))),
        changed,
    )  # fmt: skip


def person(rng: Random, deep: bool = True) -> Fact:
    """Where a person lives, works, how old they are, what they like."""
    who = rng.choice(v.NAMES)
    kind = rng.choice(("town", "job", "age", "food", "hobby", "favourite", "from"))
    if kind == "town":
        x, y = rng.sample(v.TOWNS, 2)
        asked = (
            (f"Where does {who} live?|In which town does {who} live?|In which city does {who} live?|What city does {who} live in?"
             f"|Where is {who}'s home?|Which town is home to {who}?|Tell me where {who} lives.|Do you know where {who} lives?"
             f"|Where can I find {who}?", f"{who} lives in {x}."),
            (f"Who lives in {x}?|Who has a home in {x}?|Tell me who lives in {x}.", f"{who} lives in {x}."),
        )  # fmt: skip
        said = f"{who} lives in {x}.|{who} has a house in {x}.|{who}'s home is in {x}.|{who} lives in the city of {x}.|{who} stays in {x}.|{who} is at home in {x}.|{who} has a flat in {x}."
        check = (
            f"Does {who} live in {{}}?|Is {who}'s home in {{}}?",
            f"{who} lives in {x}",
            x,
            others(rng, v.TOWNS, x),
        )
        new = f"{who} moved to {y}.|{who} has moved. {who} lives in {y} now.|No, {who} lives in {y}.|Now {who} lives in {y}."
        return Fact(kind, said, asked, x, check, Fact(kind, new, ((f"Where does {who} live?|Where does {who} live now?",
                    f"{who} lives in {y}."),), y) if deep else None)  # fmt: skip
    if kind == "from":
        x = rng.choice(v.COUNTRIES)
        asked = ((f"Where is {who} from?|Where does {who} come from?|Which country is {who} from?|What is {who}'s home country?",
                  f"{who} is from {x}."), (f"Who is from {x}?|Who comes from {x}?", f"{who} is from {x}."))  # fmt: skip
        return Fact(kind, f"{who} is from {x}.|{who} comes from {x}.|{who} was born in {x}.", asked, x,
                    (f"Is {who} from {{}}?|Does {who} come from {{}}?", f"{who} is from {x}", x, others(rng, v.COUNTRIES, x)))  # fmt: skip
    if kind == "job":
        x = rng.choice(v.JOBS)
        asked = ((f"What is {who}'s job?|What does {who} do?|What is {who}?|What does {who} work as?|What does {who} do for a living?"
                  f"|What is the job of {who}?|Which job does {who} have?|What is {who}'s profession?|What is {who}'s occupation?|What line of work is {who} in?|How does {who} earn money?|What kind of work does {who} do?", f"{who} is {a(x)}."),
                 (f"Who is the {x}?|Who is {a(x)}?|Who works as {a(x)}?|Which person is {a(x)}?", f"{who} is {a(x)}."))  # fmt: skip
        return Fact(kind, f"{who} is {a(x)}.|{who} works as {a(x)}.|{who}'s job is {x}.|{who} has a job as {a(x)}.|{who} earns money as {a(x)}.|{who} became {a(x)}.|As {a(x)}, {who} works a lot.", asked, x,
                    (f"Is {who} a {{}}?|Does {who} work as a {{}}?", f"{who} is {a(x)}", x, others(rng, v.JOBS, x)))  # fmt: skip
    if kind == "age":
        x = str(rng.randrange(2, 99))
        asked = ((f"How old is {who}?|What is {who}'s age?|What age is {who}?|Tell me how old {who} is.|What is the age of {who}?",
                  f"{who} is {x} years old."), (f"Who is {x}?|Who is {x} years old?", f"{who} is {x} years old."))  # fmt: skip
        return Fact(kind, f"{who} is {x} years old.|{who} is {x}.|{who} just turned {x}.|{who} will soon be older, but now {who} is {x}.|{who}, who is {x} years old, is here.|{who}'s age is {x}.", asked, x,
                    (f"Is {who} {{}}?|Is {who} {{}} years old?", f"{who} is {x} years old", x,
                     tuple(str(int(x) + d) for d in (1, 2, 10))))  # fmt: skip
    if kind == "favourite":
        what = rng.choice(("colour", "food", "animal", "sport"))
        x = rng.choice(
            {"colour": v.COLOURS, "food": v.FOODS, "animal": v.PETS, "sport": v.HOBBIES}[what]
        )
        asked = ((f"What is {who}'s favourite {what}?|Which {what} does {who} like best?|What {what} does {who} like?"
                  f"|What is the favourite {what} of {who}?|Which {what} is {who}'s favourite?|What {what} does {who} like most?",
                  f"{who}'s favourite {what} is {x}."),)  # fmt: skip
        return Fact(kind, f"{who}'s favourite {what} is {x}.|The favourite {what} of {who} is {x}.", asked, x,
                    (f"Is {who}'s favourite {what} {{}}?", f"{who}'s favourite {what} is {x}", x,
                     others(rng, {"colour": v.COLOURS, "food": v.FOODS, "animal": v.PETS, "sport": v.HOBBIES}[what], x)))  # fmt: skip
    pool = v.FOODS if kind == "food" else v.HOBBIES
    x, verb = rng.choice(pool), rng.choice(("likes", "loves"))
    eat = (
        f"|What food does {who} like?"
        if kind == "food"
        else f"|What is {who}'s hobby?|What does {who} like to do?"
    )
    asked = ((f"What does {who} like?|What does {who} love?|What does {who} enjoy?{eat}", f"{who} {verb} {x}."),
             (f"Who likes {x}?|Who loves {x}?|Who is fond of {x}?", f"{who} {verb} {x}."))  # fmt: skip
    return Fact(
        kind,
        f"{who} {verb} {x}.",
        asked,
        x,
        (f"Does {who} like {{}}?", f"{who} {verb} {x}", x, others(rng, pool, x)),
    )


def named(rng: Random, deep: bool = True) -> Fact:
    """A pet's name, or who somebody's relative is."""
    who = rng.choice(v.NAMES)
    if rng.random() < 0.55:
        pet, name = rng.choice(v.PETS), rng.choice(v.PET_NAMES)
        return Fact(
            "pet",
            f"{who}'s {pet} is called {name}.|{who} has {a(pet)} called {name}.|{who} has {a(pet)} named {name}."
            f"|The name of {who}'s {pet} is {name}.|{name} is {who}'s {pet}.|{who} has {a(pet)}. Its name is {name}."
            f"|{who} has {a(pet)}. The {pet} is called {name}.",
            ((f"What is the name of {who}'s {pet}?|What is {who}'s {pet} called?|What is the {pet} called?|What is the name of the {pet}?"
              f"|What name does {who}'s {pet} have?|How is the {pet} called?|What is the {pet}'s name?|Tell me the name of the {pet}."
              f"|Do you know the name of {who}'s {pet}?", f"The {pet} is called {name}."),
             (f"What pet does {who} have?|What animal does {who} have?|Which animal is {name}?|What kind of animal is {name}?|What is {name}?",
              f"{name} is {a(pet)}."),
             (f"Who has {a(pet)}?|Whose {pet} is {name}?|Who owns {name}?|Who is {name}'s owner?", f"{who} has {a(pet)}.")),
            name,
            (f"Is the {pet} called {{}}?|Is {who}'s {pet} named {{}}?", f"the {pet} is called {name}", name, others(rng, v.PET_NAMES, name)),
        )  # fmt: skip
    kin = rng.choice(v.RELATIVES)
    name = rng.choice([n for n in v.NAMES if n != who])
    return Fact(
        "kin",
        f"{who}'s {kin} is {name}.|{name} is {who}'s {kin}.|{name} is the {kin} of {who}.|{who}'s {kin} is called {name}."
        f"|{who} has a {kin} called {name}.|{who} has a {kin} named {name}.",
        ((f"Who is {who}'s {kin}?|What is the name of {who}'s {kin}?|What is {who}'s {kin} called?|Who is the {kin} of {who}?"
          f"|What is {who}'s {kin}'s name?", f"{who}'s {kin} is {name}."),
         (f"Whose {kin} is {name}?|Who is {name}?", f"{name} is {who}'s {kin}.")),
        name,
        (f"Is {{}} {who}'s {kin}?|Is {{}} the {kin} of {who}?", f"{who}'s {kin} is {name}", name, others(rng, v.NAMES, name)),
    )  # fmt: skip


def number(rng: Random, deep: bool = True) -> Fact:
    """A code, a price, a time, a day or a count."""
    kind = rng.choice(("code", "code", "price", "time", "day", "count", "count"))
    if kind == "code":
        key, lock = rng.choice(v.KEYED), rng.choice(v.LOCKED)
        digits = "".join(rng.choices("0123456789", k=rng.choice((3, 4, 4, 4, 5))))
        x = rng.choice(v.LABELS) if key == "password" and rng.random() < 0.6 else digits
        whole = rng.choice((f"{key} for the {lock}", f"{key} of the {lock}", f"{lock} {key}"))
        return Fact(
            kind,
            f"The {whole} is {x}.|My {lock} {key} is {x}.|Remember: the {whole} is {x}.|The {key} to the {lock} is {x}.|{x} is the {whole}."
            f"|Please remember that the {whole} is {x}.|Note that the {whole} is {x}.",
            ((f"What is the {whole}?|What is the {key}?|What is my {lock} {key}?|Which {key} opens the {lock}?|Tell me the {whole}."
              f"|What is the {key} for the {lock}?|What {key} does the {lock} have?|How do I open the {lock}?|Do you remember the {key}?"
              f"|Can you tell me the {whole}?|What was the {key}?|What is the {key} to the {lock}?", f"The {key} is {x}."),),
            x, (f"Is the {whole} {{}}?|Is the {key} {{}}?", f"the {key} is {x}", x, (x[::-1] + "1", "1234", "99" + x[1:])),
        )  # fmt: skip
    if kind == "price":
        thing, n = rng.choice(v.THINGS), rng.randrange(2, 100)
        x = f"{n} {rng.choice(('pounds', 'dollars', 'euros'))}"
        return Fact(
            kind,
            f"The {thing} costs {x}.|The {thing} is {x}.|The price of the {thing} is {x}.|I paid {x} for the {thing}.|I bought the {thing} for {x}.|You can have the {thing} for {x}.|They want {x} for the {thing}.",
            ((f"How much is the {thing}?|How much does the {thing} cost?|What does the {thing} cost?|What is the price of the {thing}?"
              f"|How much did I pay for the {thing}?|How much did the {thing} cost?|How much money is the {thing}?", f"The {thing} costs {x}."),),
            str(n), (f"Does the {thing} cost {{}}?", f"the {thing} costs {x}", x, (f"{n + 1} {x.split()[1]}", f"{n + 5} {x.split()[1]}")),
        )  # fmt: skip
    if kind == "time":
        event = rng.choice(v.VEHICLES)
        verb = (
            "leaves"
            if event in ("train", "bus", "plane", "ferry", "boat")
            else rng.choice(("opens", "starts", "closes"))
        )
        base = verb[:-1]
        x = rng.choice((f"{rng.randrange(1, 13)}", f"{rng.randrange(1, 13)}:{rng.choice(('15', '30', '45', '00'))}", "noon",
                        f"{rng.randrange(1, 13)} o'clock"))  # fmt: skip
        return Fact(
            kind, f"The {event} {verb} at {x}.|Our {event} {verb} at {x}.|Today the {event} {verb} at {x}.",
            ((f"When does the {event} {base}?|What time does the {event} {base}?|At what time does the {event} {base}?"
              f"|At what time will the {event} {base}?|When will the {event} {base}?|Tell me when the {event} {verb}.", f"The {event} {verb} at {x}."),),
            x, (f"Does the {event} {base} at {{}}?", f"the {event} {verb} at {x}", x, ("6:10", "2:20", "11:40")),
        )  # fmt: skip
    if kind == "day":
        event, x = rng.choice(v.EVENTS), rng.choice(v.DAYS + v.MONTHS)
        on = "on" if x in v.DAYS else "in"
        y = rng.choice([d for d in (v.DAYS if x in v.DAYS else v.MONTHS) if d != x])
        unit = "day" if x in v.DAYS else "month"
        return Fact(
            kind, f"The {event} is {on} {x}.|My {event} is {on} {x}.|Our {event} is {on} {x}.|We have a {event} {on} {x}.|The {event} takes place {on} {x}.",
            ((f"When is the {event}?|When is my {event}?|What {unit} is the {event}?|Which {unit} is the {event}?|On which day is the {event}?"
              f"|When does the {event} take place?|Tell me when the {event} is.|When do we have the {event}?", f"The {event} is {on} {x}."),
             (f"What is {on} {x}?|What do we have {on} {x}?|What happens {on} {x}?", f"The {event} is {on} {x}.")),
            x, (f"Is the {event} {on} {{}}?", f"the {event} is {on} {x}", x, others(rng, v.DAYS if x in v.DAYS else v.MONTHS, x)),
            Fact(kind, f"No, the {event} is {on} {y}.|The {event} was moved to {y}.|Sorry, the {event} is {on} {y}, not {x}.|Actually, the {event} is {on} {y}.",
                 ((f"When is the {event}?|When is the {event} now?|So when is the {event}?", f"The {event} is {on} {y}."),), y) if deep else None,
        )  # fmt: skip
    who, many, n = rng.choice(v.NAMES), rng.choice(v.COUNTABLE), rng.randrange(2, 21)
    x = v.NUMBER_WORDS[n] if rng.random() < 0.3 else str(n)
    if rng.random() < 0.4:
        spot = rng.choice(tuple(v.SPOTS))
        at = f"{v.SPOTS[spot]} the {spot}"
        return Fact(
            kind, f"There are {x} {many} {at}.|We have {x} {many} {at}.|I see {x} {many} {at}.|I put {x} {many} {at}.",
            ((f"How many {many} are {at}?|How many {many} are there?|What is the number of {many} {at}?|How many {many} do you count {at}?|How many {many} are there {at}?",
              f"There are {x} {many} {at}."),), str(n), (f"Are there {{}} {many} {at}?", f"there are {x} {many} {at}", x, (str(n + 1), str(n + 3))),
        )  # fmt: skip
    return Fact(
        kind, f"{who} has {x} {many}.|{who} owns {x} {many}.|{who} bought {x} {many}.|{who} found {x} {many}.",
        ((f"How many {many} does {who} have?|How many {many} has {who}?|How many {many} has {who} got?|What number of {many} does {who} have?"
          f"|Tell me how many {many} {who} has.|How many {many} are {who}'s?", f"{who} has {x} {many}."),
         (f"Who has {x} {many}?|Who has {many}?|Who has the {many}?", f"{who} has {x} {many}.")),
        str(n), (f"Does {who} have {{}} {many}?|Has {who} got {{}} {many}?", f"{who} has {x} {many}", x, (str(n + 1), str(n + 4))),
    )  # fmt: skip


KINDS = (
    colour,
    colour,
    colour,
    place,
    place,
    place,
    person,
    person,
    person,
    named,
    named,
    number,
    number,
    number,
)


def fact(rng: Random, deep: bool = True) -> Fact:
    """Return a fact of any kind."""
    return rng.choice(KINDS)(rng, deep)
