"""Drills: short questions that need no text: sums, lists, code, and a little common knowledge.

Each drill gives (topic, form number said, ways to ask, answer); `ask` picks a way for the split.
"""

from random import Random

from mlxkv.texts.worlds.grammar import NUMBERS, article, capital, choose_form, listed, number, ways
from mlxkv.texts.worlds.knowledge import KNOWN
from mlxkv.texts.worlds.words import (
    ANIMALS,
    CAPITALS,
    COLOUR_OF,
    COLOUR_OF_MANY,
    COLOURS,
    COUNTABLES,
    DAYS,
    DISHES,
    LABELS,
    MEANINGS,
    MONTHS,
    OPPOSITES,
    PAST,
    PEOPLE,
    PETS,
    THINGS,
)

Drill = tuple[str, int, tuple[str, ...], str]


def _drill(topic: str, said: int, direct: str, indirect: str, answer: str) -> Drill:
    return topic, said, ways(direct, indirect)[:6], answer


def capital_city(rng: Random) -> Drill:
    n = rng.randrange(len(CAPITALS))
    country, city = list(CAPITALS.items())[n]
    thing = f"the capital of {country}"
    return _drill(
        "capital", n, f"what is {thing}", f"what {thing} is", f"The capital of {country} is {city}."
    )


def opposite(rng: Random) -> Drill:
    n = rng.randrange(len(OPPOSITES))
    word, other = list(OPPOSITES.items())[n]
    if rng.random() < 0.4 and other not in OPPOSITES and word not in ("soft", "good"):
        unique = list(OPPOSITES.values()).count(other) == 1
        word, other = (other, word) if unique else (word, other)
    thing = f"the opposite of {word}"
    return _drill(
        "opposite", n, f"what is {thing}", f"what {thing} is", f"The opposite of {word} is {other}."
    )


def plural(rng: Random) -> Drill:
    words = COUNTABLES | {name: many for name, (many, _, _) in ANIMALS.items()}
    n = rng.randrange(len(words))
    one, many = list(words.items())[n]
    thing = f"the plural of {one}"
    return _drill(
        "plural", n, f"what is {thing}", f"what {thing} is", f"The plural of {one} is {many}."
    )


def past(rng: Random) -> Drill:
    n = rng.randrange(len(PAST))
    now, then = list(PAST.items())[n]
    thing = f"the past of {now}"
    return _drill(
        "past", n, f"what is {thing}", f"what {thing} is", f"The past of {now} is {then}."
    )


def animal(rng: Random) -> Drill:
    n = rng.randrange(len(ANIMALS))
    name, (many, sound, home) = list(ANIMALS.items())[n]
    if rng.random() < 0.5:
        return _drill(
            "sound",
            n,
            f"what sound does {article(name)} make",
            f"what sound {article(name)} makes",
            f"{capital(article(name))} {sound}.",
        )
    return _drill(
        "lives", n, f"where do {many} live", f"where {many} live", f"{capital(many)} live {home}."
    )


def colour(rng: Random) -> Drill:
    n = rng.randrange(len(COLOUR_OF) + len(COLOUR_OF_MANY))
    name, value = (list(COLOUR_OF.items()) + list(COLOUR_OF_MANY.items()))[n]
    verb = "is" if name in COLOUR_OF else "are"
    return _drill(
        "colour",
        n,
        f"what colour {verb} {name}",
        f"what colour {name} {verb}",
        f"{capital(name)} {verb} {value}.",
    )


def meaning(rng: Random) -> Drill:
    n = rng.randrange(len(MEANINGS))
    word, text = list(MEANINGS.items())[n]
    return _drill("meaning", n, f"what is {article(word)}", f"what {article(word)} is", text)


def calendar(rng: Random) -> Drill:
    names = DAYS if rng.random() < 0.5 else MONTHS
    n = rng.randrange(len(names))
    step, word = ((1, "after"), (-1, "before"))[rng.randrange(2)]
    kind = "day" if names is DAYS else "month"
    answer = f"The {kind} {word} {names[n]} is {names[(n + step) % len(names)]}."
    thing = f"the {kind} {word} {names[n]}"
    return _drill("calendar", n, f"what is {thing}", f"what {thing} is", answer)


def sum_of(rng: Random) -> Drill:
    kind = rng.randrange(3)
    if kind == 0:
        a, b = rng.randrange(1, 100), rng.randrange(1, 100)
        text, result = f"{a} plus {b}", a + b
    elif kind == 1:
        a = rng.randrange(2, 100)
        b = rng.randrange(1, a + 1)
        text, result = f"{a} minus {b}", a - b
    else:
        a, b = rng.randrange(1, 11), rng.randrange(1, 11)
        text, result = f"{a} times {b}", a * b
    return _drill(
        "sum", a + b, f"what is {text}", f"what {text} is", f"{capital(text)} is {result}."
    )


def apples(rng: Random) -> Drill:
    who, other = rng.sample(PEOPLE, 2)
    many = rng.choice(tuple(COUNTABLES.values()))
    a, b = rng.randrange(3, 10), rng.randrange(1, 10)
    if rng.random() < 0.5:
        told, result = (
            f"{who} has {number(a)} {many}. {other} gives {number(b)} more to {who}.",
            a + b,
        )
    else:
        b = rng.randrange(1, a - 1)
        told, result = (
            f"{who} has {number(a)} {many}. {who} gives {number(b)} of them to {other}.",
            a - b,
        )
    forms = ways(f"how many {many} does {who} have now", f"how many {many} {who} has now")[:6]
    return (
        "apples",
        a + b,
        tuple(f"{told} {form}" for form in forms),
        f"{who} has {number(result)} {many}.",
    )


def list_item(rng: Random) -> Drill:
    source = rng.choice((list(COUNTABLES.values()), PEOPLE, COLOURS, PETS, DISHES))
    items = rng.sample(source, rng.randrange(3, 8))
    told = f"Here is a list: {listed(items)}."
    kind = rng.randrange(4)
    if kind == 0:
        direct, indirect, answer = (
            "what comes first in the list",
            "what comes first in the list",
            f"The first one is {items[0]}.",
        )
    elif kind == 1:
        direct, indirect, answer = (
            "what comes last in the list",
            "what comes last in the list",
            f"The last one is {items[-1]}.",
        )
    elif kind == 2:
        n = rng.randrange(len(items) - 1)
        direct = indirect = f"what comes after {items[n]} in the list"
        answer = f"After {items[n]} comes {items[n + 1]}."
    else:
        direct, indirect = "how many items are in the list", "how many items are in the list"
        answer = f"There are {number(len(items))} items in the list."
    forms = ways(direct, indirect)[:6]
    return "list", kind + len(items), tuple(f"{told} {form}" for form in forms), answer


def sort_list(rng: Random) -> Drill:
    numbers = rng.sample(range(1, 100), rng.randrange(3, 6))
    kind = rng.randrange(3)
    told = listed([str(n) for n in numbers])
    what, answer = (
        ("largest", f"The largest number is {max(numbers)}."),
        ("smallest", f"The smallest number is {min(numbers)}."),
        ("last", f"The last number is {numbers[-1]}."),
    )[kind]
    direct, indirect = (
        f"which of the numbers {told} is the {what}",
        f"which of the numbers {told} is the {what}",
    )
    return _drill("numbers", kind, direct, indirect, answer)


def known(rng: Random) -> Drill:
    n = rng.randrange(len(KNOWN))
    return _drill("known", n, *KNOWN[n])


def whether(rng: Random) -> Drill:
    things = list(COLOUR_OF.items()) + list(COLOUR_OF_MANY.items())
    n = rng.randrange(len(things))
    name, value = things[n]
    verb = "is" if name in COLOUR_OF else "are"
    guess = value if rng.random() < 0.5 else rng.choice(COLOURS)
    answer = f"Yes, {name} {verb} {value}." if guess == value else f"No, {name} {verb} {value}."
    forms = (
        f"{capital(verb)} {name} {guess}?",
        f"Is it true that {name} {verb} {guess}?",
        f"Can you say if {name} {verb} {guess}?",
        f"Do you think that {name} {verb} {guess}?",
        f"Somebody said that {name} {verb} {guess}. Is that right?",
        f"I ask myself if {name} {verb} {guess}.",
    )
    return "whether", n, forms, answer


def about(rng: Random) -> Drill:
    n = rng.randrange(len(ANIMALS))
    name, (many, sound, home) = list(ANIMALS.items())[n]
    answer = f"{capital(many)} are animals. They live {home}. {capital(article(name))} {sound}."
    forms = (
        "Tell me about {}.",
        "What do you know about {}?",
        "Tell me something about {}.",
        "I want to know more about {}.",
        "Please describe {}.",
        "Write about {}.",
    )
    return "about", n, tuple(form.format(many) for form in forms), answer


def count_up(rng: Random) -> Drill:
    first = rng.randrange(0, 30)
    last = first + rng.randrange(2, 9)
    forms = (
        "Count from {} to {}.",
        "Can you count from {} to {}?",
        "Please count from {} to {}.",
        "List the numbers from {} to {}.",
        "Write the numbers from {} to {}.",
        "Say all numbers from {} to {}.",
    )
    answer = ", ".join(str(n) for n in range(first, last + 1)) + "."
    return "count", first, tuple(form.format(first, last) for form in forms), answer


def larger(rng: Random) -> Drill:
    a, b = rng.sample(range(1, 200), 2)
    what, result = (("larger", max(a, b)), ("smaller", min(a, b)))[rng.randrange(2)]
    direct = f"which number is {what}, {a} or {b}"
    return _drill("larger", a + b, direct, direct, f"{result} is {what}.")


def repeat(rng: Random) -> Drill:
    source = list(COUNTABLES.values()) + COLOURS + PETS + DISHES + THINGS + LABELS + NUMBERS
    words = rng.sample(sorted(set(source)), rng.randrange(2, 7))
    text = " ".join(words)
    forms = (
        "Repeat after me: {}",
        "Say this again: {}",
        "Please repeat: {}",
        "Repeat these words: {}",
        "Copy this: {}",
        "Write the same words: {}",
    )
    return "repeat", len(words), tuple(form.format(text) for form in forms), f"{capital(text)}."


def _program(rng: Random) -> tuple[str, object]:
    name, other = rng.sample(("x", "y", "n", "total", "count", "size"), 2)
    a, b = rng.randrange(1, 20), rng.randrange(1, 20)
    sign, result = (("+", a + b), ("-", a - b))[rng.randrange(2)]
    kind = rng.randrange(5)
    if kind == 0:
        items = [rng.randrange(1, 10) for _ in range(rng.randrange(2, 6))]
        what, result = (("len", len(items)), ("max", max(items)), ("min", min(items)))[
            rng.randrange(3)
        ]
        return f"{name} = {items}\nprint({what}({name}))", result
    if kind == 1:
        what = {"+": "add", "-": "subtract"}[sign]
        return f"def {what}(a, b):\n    return a {sign} b\n\nprint({what}({a}, {b}))", result
    if kind == 2:
        n = rng.randrange(2, 6)
        return f"for i in range({n}):\n    print(i)", listed([str(i) for i in range(n)])
    if kind == 3:
        words = rng.sample(PETS, 3)
        n = rng.randrange(3)
        return f"{name} = {words}\nprint({name}[{n}])", words[n]
    return f"{name} = {a}\n{other} = {name} {sign} {b}\nprint({other})", result


def code(rng: Random) -> Drill:
    lines, result = _program(rng)
    forms = ways("what does this program print", "what this program prints")[:6]
    return "code", len(lines), tuple(f"{form}\n{lines}" for form in forms), f"It prints {result}."


def favourite(rng: Random) -> Drill:
    who = rng.choice(PEOPLE)
    like, dislike = rng.sample(DISHES, 2)
    told = f"{who} likes {like} but not {dislike}."
    if rng.random() < 0.5:
        direct, indirect, answer = (
            f"what does {who} like",
            f"what {who} likes",
            f"{who} likes {like}.",
        )
    else:
        direct, indirect, answer = (
            f"what does {who} not like",
            f"what {who} does not like",
            f"{who} does not like {dislike}.",
        )
    forms = ways(direct, indirect)[:6]
    return "likes", len(who), tuple(f"{told} {form}" for form in forms), answer


DRILLS = (
    capital_city,
    opposite,
    plural,
    past,
    animal,
    colour,
    meaning,
    calendar,
    sum_of,
    sum_of,
    sum_of,
    sum_of,
    apples,
    list_item,
    list_item,
    sort_list,
    code,
    code,
    favourite,
    known,
    known,
    whether,
    about,
    count_up,
    larger,
    repeat,
)


def ask(rng: Random, split: str = "train") -> tuple[str, str]:
    """Return a drill of any kind: question and answer."""
    topic, said, forms, answer = rng.choice(DRILLS)(rng)
    return forms[choose_form(rng, topic, said, len(forms), split)], answer
