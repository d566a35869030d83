# ruff: noqa: E501 - phrases of one meaning a line read better than wrapped ones
"""Clauses of many verbs, told and asked in many orders: active, passive, with the place or time in front, in relative clauses."""

from random import Random

from chat import vocabulary as v
from chat.facts import Fact
from chat.grammar.phrases import choose, tidy
from chat.grammar.verbs import GAMES, MOVES, TEXTS, VERBS, third
from chat.vocabulary import a

TIMES = [
    "yesterday",
    "today",
    "last week",
    "this morning",
    "in the evening",
    "at night",
    "at noon",
    "last summer",
    "in winter",
    "last night",
    "last year",
    "this week",
    "after lunch",
    "before dinner",
    "at midnight",
    "on Monday",
    "on Tuesday",
    "on Wednesday",
    "on Thursday",
    "on Friday",
    "on Saturday",
    "on Sunday",
    "in May",
    "in July",
    "in March",
    "at six",
    "at nine",
    "at 8:30",
    "at 4:15",
]
TOLD = "(|||||I know that|I heard that|It seems that|We saw that|I think that|They told me that|It is true that|Listen:|Look:|Well,|You know,|As you know,|I must say that|My friend says that|Everybody knows that|News:|I just heard that|Do you know that) "
NOUN = {"thing": "thing", "food": "food", "animal": "animal", "text": "thing", "game": "game"}


def subject(rng: Random) -> tuple[str, str]:
    """Somebody, as the user says it in a sentence and as the reply does."""
    roll = rng.random()
    if roll < 0.62:
        name = rng.choice(v.NAMES)
        return name, name
    if roll < 0.8:
        kin = rng.choice(
            [*v.RELATIVES, "grandmother", "grandfather", "dad", "mum", "dog", "cat", "team"]
        )
        return f"my {kin}", f"your {kin}"
    if roll < 0.9:
        return f"the {rng.choice(v.JOBS)}", ""
    who = rng.choice(["king", "queen", "girl", "boy", "woman", "man", "child", *v.PETS])
    return f"the {who}", ""


def thing(rng: Random, kind: str) -> str:
    """What it is done to."""
    if kind == "person":
        return rng.choice(v.NAMES)
    if kind == "food":
        return f"the {rng.choice(v.FOODS)}" if rng.random() < 0.3 else rng.choice(v.FOODS)
    if kind == "text":
        word = rng.choice(TEXTS)
        return rng.choice((f"the {word}", a(word), f"{a(rng.choice(v.KINDS))} {word}"))
    if kind == "game":
        return rng.choice(GAMES)
    word = rng.choice(v.PETS if kind == "animal" else v.THINGS)
    return rng.choice((f"the {word}", a(word), a(rng.choice(v.COLOURS)) + f" {word}"))


def clause(rng: Random) -> Fact:
    """SOMEBODY DID SOMETHING, perhaps with a place or a time, in the past, the present, or in progress."""
    if rng.random() < 0.22:
        return moved(rng)
    base, past, done, doing, kind = rng.choice(VERBS)
    who, told = subject(rng)
    told = told or who
    what = thing(rng, kind)
    tense = rng.choice(("past", "past", "past", "present", "doing", "will"))
    form, does, do = {
        "past": (past, "did", base),
        "present": (third(base), "does", base),
        "doing": (f"is {doing}", "is", doing),
        "will": (f"will {base}", "will", base),
    }[tense]
    be = {"past": "was", "present": "is", "doing": "is being", "will": "will be"}[tense]
    head, more = be.split()[0], " ".join([*be.split()[1:], ""])
    roll, at, when = rng.random(), "", ""
    if roll < 0.35 and kind != "game":
        spot = rng.choice(tuple(v.SPOTS))
        at = f"in {rng.choice(v.TOWNS)}" if kind == "person" else f"{v.SPOTS[spot]} the {spot}"
    elif roll < 0.6 and tense == "past":
        when = rng.choice(TIMES)
    extra = f" {at}{when}" if at or when else ""
    passive = f"{what} {be} {done}{extra} by {who}|{what} {be} {done} by {who}{extra}"
    said = f"{who} {form} {what}{extra}|{who} {form} {what}{extra}|{who} {form} {what}{extra}|{passive}"
    said += f"|it is {who} who {form} {what}{extra}|what {who} {form}{extra} is {what}|the one who {form} {what}{extra} is {who}|{what} is what {who} {form}{extra}"
    if extra:
        said += f"|{extra} {who} {form} {what}|{extra}, {who} {form} {what}|{extra} {what} {be} {done} by {who}|it was {extra} that {who} {form} {what}"
    tail = rng.choice(("", "", "", "", "", ", not somebody else", ", I think", ", of course"))
    sentence = tidy(f"{told} {form} {what}{extra}.")
    x = f"({extra}|)" if extra else ""
    asks = [
        (f"who {form} {what}{x}?|who was it (that|who) {form} {what}?|by whom {head} {what} {more}{done}?|{what} {be} {done} by (whom|who|which person)?|(which|what) person {form} {what}{x}?|(name|tell me) the (one|person) who {form} {what}.|the (one|person) who {form} {what} is (who|called|named)?|{what}: who {form} {'it' if kind != 'person' else 'them'}?|somebody {form} {what}. who (was it|is it|is that)?|(tell me|say) by whom {what} {be} {done}.|do you know the one who {form} {what}?|whose work was it: who {form} {what}?", sentence),
    ]  # fmt: skip
    if kind == "person":
        asks.append((f"(who|whom) {does} {who} {do}{x}?|{who} {form} (who|whom){x}?|who {be} {done} by {who}{x}?|who was it that {who} {form}?|(name|tell me) the (one|person) (that|whom|) {who} {form}.|(tell me|say) who {who} {form}.|the (one|person) {who} {form} is called?|(which|what) person {does} {who} {do}?|{who} {form} somebody. who (is it|was it)?", sentence))  # fmt: skip
    else:
        word = NOUN[kind]
        asks.append((f"what {does} {who} {do}{x}?|{who} {form} what{x}?|what {be} {done} by {who}{x}?|(which|what) {word} {does} {who} {do}{x}?|what is it (that|) {who} {form}?|(name|tell me) (what|the {word}) {who} {form}.|{who} {form} something. what (is it|was it)?|the {word} (that|) {who} {form} is (what|called)?|what exactly {does} {who} {do}?|about {who}: what {does} {who} {do}?|what did I say {who} {form}?|(which|what) {word} {be} {done} by {who}?", sentence))  # fmt: skip
    if at:
        asks.append((f"where {does} {who} {do} {what}?|{who} {form} {what} where?|where {head} {what} {more}{done}?|in (which|what) place {does} {who} {do} {what}?|(name|tell me) the place where {who} {form} {what}.|where was {who} (when|as) {who} {form} {what}?|where is it that {who} {form} {what}?|{what} {be} {done} where?", sentence))  # fmt: skip
    if when:
        asks.append((f"when {does} {who} {do} {what}?|{who} {form} {what} when?|when {be} {what} {done}( by {who}|)?|(tell me|say) when {who} {form} {what}.|when was it that {who} {form} {what}?|since when {be} {what} {done}?|at (which|what) time {does} {who} {do} {what}?|{what} {be} {done} when?", sentence))  # fmt: skip
    if tense in ("past", "doing", "present"):
        asks.append((f"what {does} {who} {'do' if tense != 'doing' else 'doing'}{x}?|what (is|was) {who} (doing|busy with)?|what happened to {what}?|tell me (more |)about {who}.|what do you know about {who}?", sentence))  # fmt: skip
    first, rest = asks[:2], asks[2:]
    rng.shuffle(first)
    kept = first + rest * 2
    if rng.random() < 0.5:
        rng.shuffle(kept)
    wrong = tuple(thing(rng, kind) for _ in range(3))
    check = (
        _some(rng, f"{does} {who} {do} {{}}{x}?|was it {{}} that {who} {form}?|{head} {{}} {more}{done} by {who}?", 2),
        sentence.rstrip(".").replace(tidy(told), told, 1), what, wrong,
    )  # fmt: skip
    return Fact(
        "clause",
        _some(rng, f"{TOLD}({said}){tail}.", 2),
        tuple((_some(rng, forms, 3), answer) for forms, answer in kept),
        what,
        check if what not in wrong else None,
    )


def _some(rng: Random, text: str, count: int) -> str:
    return "|".join(dict.fromkeys(tidy(choose(rng, f"({text})")) for _ in range(count)))


def moved(rng: Random) -> Fact:
    """SOMEBODY TRAVELS TO SOMEWHERE, LOOKS FOR SOMETHING, TALKS TO SOMEBODY."""
    base, past, doing, link, kind = rng.choice(MOVES)
    who, told = subject(rng)
    told = told or who
    what = rng.choice(v.TOWNS) if kind == "town" else thing(rng, kind)
    form, does, do = rng.choice(
        ((past, "did", base), (third(base), "does", base), (f"is {doing}", "is", doing))
    )
    sentence = tidy(f"{told} {form} {link} {what}.")
    wh = {"town": "which (city|town|place)", "person": "(whom|which person)", "thing": "(what|which thing)", "animal": "(what|which animal)"}[kind]  # fmt: skip
    bare = {"town": "where", "person": "who", "thing": "what", "animal": "what"}[kind]
    if kind == "town":
        bare = "where" if link in ("in", "to") else "what city"
    end = "" if bare == "where" else f" {link}"
    asks = [
        (f"{bare} {does} {who} {do}{end}?|{link} {wh} {does} {who} {do}?|{who} {form} {link} {wh}?|{wh} {does} {who} {do} {link}?|(tell me|say) {bare} {who} {form}{end}.|{who} {form} {link} (what|which one)?|the {'place' if kind == 'town' else 'one'} {who} {form} {link} is (what|which|called)?", sentence),
        (f"who {form} {link} {what}?|(which|what) person {form} {link} {what}?|(name|tell me) the one who {form} {link} {what}.|who was it that {form} {link} {what}?|the one who {form} {link} {what} is (who|called)?", sentence),
    ]  # fmt: skip
    said = f"{who} {form} {link} {what}|{who} {form} {link} {what}|it is {what} that {who} {form} {link}|{what} is {'where' if bare == 'where' else 'what'} {who} {form}{end}|the one who {form} {link} {what} is {who}|now {who} {form} {link} {what}"
    return Fact(
        "clause",
        _some(rng, f"{TOLD}({said}).", 2),
        tuple((_some(rng, forms, 3), answer) for forms, answer in asks),
        what,
    )
