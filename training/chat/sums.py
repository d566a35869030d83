# ruff: noqa: E501 - forms of one meaning a line read better than wrapped ones
"""Small sums, counting, comparing and the calendar: one question, one answer."""

from random import Random

from chat.facts import pick
from chat.vocabulary import COUNTABLE, DAYS, LETTERS, MONTHS, NAMES, NUMBER_WORDS

Pair = tuple[str, str]


def sum_of(rng: Random) -> Pair:
    """Plus, minus and times, in digits, signs or words."""
    top = rng.choices((10, 20, 50), (0.42, 0.43, 0.15))[0]
    x, y = rng.randrange(0, top + 1), rng.randrange(0, top + 1)
    roll = rng.random()
    if roll < 0.52:
        word, sign, z = "plus", "+", x + y
        more = f"What do you get if you add {x} and {y}?|Add {x} and {y}.|Add {y} to {x}.|What is the sum of {x} and {y}?|{x} and {y} makes?|How much is {x} and {y}?|{x} and {y} together?|What is {x} and {y}?|Can you add {x} and {y}?|Add up {x} and {y}.|{y} more than {x} is?|What is {y} more than {x}?|Let us add {x} and {y}.|I add {y} to {x}. What do I get?"
    elif roll < 0.85:
        x, y = max(x, y), min(x, y)
        word, sign, z = "minus", "-", x - y
        more = f"Subtract {y} from {x}.|Take {y} from {x}.|What is {y} less than {x}?|What is {x} take away {y}?|What is left if you take {y} from {x}?|{x} take away {y}"
    else:
        x, y = rng.randrange(0, 11), rng.randrange(0, 11)
        word, sign, z = "times", rng.choice("*x"), x * y
        more = f"Multiply {x} by {y}.|What is {x} multiplied by {y}?|What do you get if you multiply {x} by {y}?|How much is {x} times {y}?"
    answer = f"{x} {word} {y} is {z}."
    s, t = (NUMBER_WORDS[x], NUMBER_WORDS[y]) if max(x, y) <= 20 and rng.random() < 0.2 else (x, y)
    forms = (
        f"What is {s} {word} {t}?|What is {s} {word} {t}?|How much is {s} {word} {t}?|{s} {word} {t}|{s} {word} {t}?|What's {s} {word} {t}?"
        f"|Calculate {s} {word} {t}.|Can you tell me what {s} {word} {t} is?|Tell me what {s} {word} {t} is.|{s} {word} {t} is what?"
        f"|How much does {s} {word} {t} make?|What does {s} {word} {t} equal?|Please work out {s} {word} {t}.|{s} {word} {t} equals?"
        f"|Solve {s} {word} {t}.|Do you know what {s} {word} {t} is?|I want to know {s} {word} {t}.|Work out {s} {word} {t}.|Compute {s} {word} {t}.|{s} {word} {t}, please.|Please calculate {s} {word} {t}.|What will {s} {word} {t} be?|The answer of {s} {word} {t}?"
        f"|{s} {word} {t} gives?|And {s} {word} {t}?|Now {s} {word} {t}.|What number is {s} {word} {t}?|What makes {s} {word} {t}?|Can you do {s} {word} {t}?|How many are {s} {word} {t}?"
    )
    if s is x:
        forms += (
            f"|{x}{sign}{y}|{x}{sign}{y}|{x} {sign} {y}|{x}{sign}{y}=|{x} {sign} {y} =|{x} {sign} {y} = ?|{x}{sign}{y}=?|{x}{sign}{y}?|What is {x}{sign}{y}?"
            f"|What is {x} {sign} {y}?|Calculate {x}{sign}{y}|Calculate {x} {sign} {y}.|How much is {x}{sign}{y}?|what's {x} {sign} {y}?|solve {x}{sign}{y}|{more}"
        )
    return pick(rng, forms), answer


def story_sum(rng: Random) -> Pair:
    """Somebody has some, and gets or loses some."""
    who, to = rng.sample(NAMES, 2)
    many, top = rng.choice(COUNTABLE), rng.choice((10, 10, 20))
    x, y = rng.randrange(1, top + 1), rng.randrange(1, top + 1)
    if rng.random() < 0.5:
        text = pick(rng, f"{who} has {x} {many}. {who} gets {y} more.|{who} has {x} {many} and buys {y} more.|{who} had {x} {many} and found {y} more."
                    f"|{who} has {x} {many}. {to} gives {who} {y} more.|{who} has {x} {many} and gets {y} more {many}.|If {who} has {x} {many} and gets {y} more,")  # fmt: skip
        z = x + y
    else:
        x, y = max(x, y), min(x, y)
        text = pick(rng, f"{who} has {x} {many}. {who} eats {y}.|{who} has {x} {many} and gives {y} to {to}.|{who} had {x} {many} and lost {y}."
                    f"|{who} has {x} {many}. {who} gives {y} away.|{who} has {x} {many}. {who} gives {to} {y}.|If {who} has {x} {many} and loses {y},")  # fmt: skip
        z = x - y
    ask = pick(rng, f"How many {many} does {who} have now?|How many {many} does {who} have?|How many {many} are left?|How many {many} does {who} have in the end?"
               if z < x else f"How many {many} does {who} have now?|How many {many} does {who} have?|How many {many} does {who} have in all?"
               f"|How many {many} does {who} have altogether?")  # fmt: skip
    ask = ask[0].lower() + ask[1:] if text.endswith(",") else ask
    return f"{text} {ask}", f"{who} has {z} {many}."


def halves(rng: Random) -> Pair:
    n = rng.randrange(1, 21)
    if rng.random() < 0.5:
        return pick(
            rng, f"What is half of {2 * n}?|What is {2 * n} divided by 2?|What's half of {2 * n}?"
        ), f"Half of {2 * n} is {n}."
    return pick(
        rng, f"What is double {n}?|What is twice {n}?|What is two times {n}?|Double {n}."
    ), f"Twice {n} is {2 * n}."


def counting(rng: Random) -> Pair:
    """Count up, down, by steps; letters."""

    def say(n: int) -> str:
        return NUMBER_WORDS[n] if n <= 20 and rng.random() < 0.5 else str(n)

    roll = rng.random()
    if roll < 0.4:
        n = rng.choice((3, 4, 5, 5, 5, 6, 7, 8, 9, 10, 10, 10, 12, 15, 20))
        ask = pick(rng, f"Count to {say(n)}.|Count from one to {say(n)}.|Count up to {say(n)}.|Can you count to {say(n)}?|Please count to {say(n)}."
                   f"|Count from 1 to {n}.|Say the numbers from 1 to {n}.|Count to {say(n)} for me.|List the numbers from 1 to {n}."
                   f"|Write the numbers 1 to {n}.|I want you to count to {say(n)}.|Let us count to {say(n)}.|Show me the numbers from one to {say(n)}.|Could you count up to {say(n)}?")  # fmt: skip
        return ask, ", ".join(map(str, range(1, n + 1))) + "."
    if roll < 0.55:
        n = rng.choice((3, 4, 5, 5, 6, 8, 10, 10))
        ask = pick(rng, f"Count down from {say(n)}.|Count backwards from {say(n)}.|Count down from {n} to 1.|Count from {n} down to 1.|Count backward from {say(n)}.|Can you count down from {say(n)}?"
                   f"|Count from {say(n)} to one.|Give me a countdown from {say(n)}.")  # fmt: skip
        return ask, ", ".join(map(str, range(n, 0, -1))) + "."
    if roll < 0.68:
        x = rng.randrange(2, 20)
        n = x + rng.randrange(2, 7)
        return pick(rng, f"Count from {say(x)} to {say(n)}.|Say the numbers from {x} to {n}.|List the numbers from {x} to {n}.|Count up from {x} to {n}."), ", ".join(map(str, range(x, n + 1))) + "."  # fmt: skip
    if roll < 0.76:
        step, n = rng.choice(((2, 10), (2, 20), (5, 20), (5, 30), (10, 50), (10, 100)))
        return pick(rng, f"Count by {say(step)}s to {n}.|Count to {n} by {say(step)}s.|Count in {say(step)}s up to {n}.|Count to {n} in steps of {step}."), ", ".join(map(str, range(step, n + 1, step))) + "."  # fmt: skip
    if roll < 0.86:
        n = rng.randrange(2, 9)
        ask = pick(rng, f"What are the first {say(n)} letters of the alphabet?|Say the first {say(n)} letters.|First {say(n)} letters of the alphabet.|List the first {say(n)} letters of the alphabet.|Name the first {say(n)} letters.")  # fmt: skip
        return ask, ", ".join(LETTERS[:n]) + "."
    if roll < 0.9:
        return pick(rng, "Say the alphabet.|What is the alphabet?|Recite the alphabet.|List the letters of the alphabet.|Can you say the alphabet?|Tell me the alphabet.|Write the alphabet."), ", ".join(LETTERS) + "."  # fmt: skip
    n = rng.randrange(1, 5)
    of = rng.choice(("odd", "even"))
    start = 1 if of == "odd" else 2
    return pick(rng, f"Name the first {say(n + 1)} {of} numbers.|What are the first {say(n + 1)} {of} numbers?"), ", ".join(str(start + 2 * i) for i in range(n + 1)) + "."  # fmt: skip


def order(rng: Random) -> Pair:
    """What comes before and after: numbers, letters, days, months."""
    kind = rng.choice(("number", "letter", "day", "day", "month", "month"))
    items = {
        "number": [str(n) for n in range(1, 101)],
        "letter": list(LETTERS),
        "day": DAYS + DAYS[:1],
        "month": MONTHS + MONTHS[:1],
    }[kind]
    at = rng.randrange(0, len(items) - 1)
    x, y = items[at], items[at + 1]
    what = {"number": "Which number|What number|What", "letter": "Which letter|What letter|What", "day": "Which day|What day|What", "month": "Which month|What month|What"}[kind]  # fmt: skip
    w = pick(rng, what)
    if rng.random() < 0.6:
        said = f"{w} comes after {x}?|{w} follows {x}?|{w} is after {x}?|{w} comes right after {x}?|{w} comes next after {x}?|After {x} comes?|{w} is next after {x}?"
        if kind in ("day", "month"):
            said += f"|What is the {kind} after {x}?|Name the {kind} after {x}.|Which {kind} is the one after {x}?"
        if kind == "day":
            said += f"|Today is {x}. What day is tomorrow?|If today is {x}, what day is tomorrow?|If today is {x}, which day is it tomorrow?"
        return pick(rng, said), f"{y} comes after {x}."
    said = f"{w} comes before {y}?|{w} is before {y}?|{w} comes right before {y}?|{w} comes just before {y}?"
    if kind in ("day", "month"):
        said += f"|What is the {kind} before {y}?|Name the {kind} before {y}."
    if kind == "day":
        said += f"|Today is {y}. What day was yesterday?|If today is {y}, what day was yesterday?"
    return pick(rng, said), f"{x} comes before {y}."


def compare(rng: Random) -> Pair:
    """Which number is larger, even or odd."""
    x, y = rng.sample(range(0, rng.choice((11, 21, 101))), 2)
    big, small = max(x, y), min(x, y)
    roll = rng.random()
    if roll < 0.3:
        word = pick(rng, "bigger|larger|greater|more|higher")
        return pick(rng, f"Which is {word}, {x} or {y}?|Which number is {word}, {x} or {y}?|What is {word}, {x} or {y}?|{x} or {y}, which is {word}?"), f"{big} is {'more' if word == 'more' else word} than {small}."  # fmt: skip
    if roll < 0.5:
        word = pick(rng, "smaller|less|lower")
        return pick(
            rng,
            f"Which is {word}, {x} or {y}?|Which number is {word}, {x} or {y}?|What is {word}, {x} or {y}?",
        ), f"{small} is {word} than {big}."
    if roll < 0.75:
        word, right = rng.choice(
            (
                ("bigger", x > y),
                ("larger", x > y),
                ("greater", x > y),
                ("more", x > y),
                ("smaller", x < y),
                ("less", x < y),
            )
        )
        ask = pick(
            rng,
            f"Is {x} {word} than {y}?|Is {x} {word} than {y}? Answer yes or no.|Is the number {x} {word} than {y}?",
        )
        return ask, f"Yes, {x} is {word} than {y}." if right else f"No, {x} is not {word} than {y}."
    n = rng.randrange(0, 31)
    word = rng.choice(("even", "odd"))
    if rng.random() < 0.3:
        return pick(
            rng, f"Is {n} even or odd?|Is {n} odd or even?|Is the number {n} odd or even?"
        ), f"{n} is {'odd' if n % 2 else 'even'}."
    right = (n % 2 == 1) == (word == "odd")
    return pick(
        rng, f"Is {n} {word}?|Is {n} an {word} number?|Is {n} {word}? Answer yes or no."
    ), f"Yes, {n} is {word}." if right else f"No, {n} is not {word}."


def true_sum(rng: Random) -> Pair:
    """Is 2 + 2 = 5?"""
    x, y = rng.randrange(1, 11), rng.randrange(1, 11)
    z = x + y + (0 if rng.random() < 0.5 else rng.choice((-2, -1, 1, 2)))
    ask = pick(
        rng,
        f"Is {x} plus {y} {z}?|Is {x} + {y} = {z}?|Is {x}+{y} equal to {z}?|Does {x} plus {y} equal {z}?|Is it true that {x} plus {y} is {z}?",
    )
    return ask, f"Yes, {x} plus {y} is {z}." if z == x + y else f"No, {x} plus {y} is {x + y}."


def prime(rng: Random) -> Pair:
    n = rng.randrange(2, 21)
    yes = n in (2, 3, 5, 7, 11, 13, 17, 19)
    return pick(rng, f"Is {n} a prime number?|Is {n} prime?|Is {n} a prime number? Answer yes or no."), f"{'Yes' if yes else 'No'}, {n} is {'' if yes else 'not '}a prime number."  # fmt: skip


MAKERS = (
    (sum_of, 17),
    (story_sum, 5),
    (halves, 1),
    (counting, 7),
    (order, 4),
    (compare, 3),
    (true_sum, 1),
    (prime, 0.5),
)


def ask(rng: Random) -> Pair:
    """Return a question with one right answer."""
    makers, shares = zip(*MAKERS, strict=True)
    return rng.choices(makers, shares)[0](rng)
