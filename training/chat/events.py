# ruff: noqa: E501 - forms of one meaning a line read better than wrapped ones
"""What somebody did with something, somewhere, at some time: facts of any verb, so that no kind of question is special."""

from random import Random

from chat import vocabulary as v
from chat.facts import Fact
from chat.vocabulary import a

# past, base form, what it is done to: a thing, a food, a person, an animal
VERBS = [
    "saw see thing",
    "found find thing",
    "bought buy thing",
    "sold sell thing",
    "painted paint thing",
    "lost lose thing",
    "broke break thing",
    "cleaned clean thing",
    "fixed fix thing",
    "carried carry thing",
    "hid hide thing",
    "opened open thing",
    "took take thing",
    "brought bring thing",
    "borrowed borrow thing",
    "made make thing",
    "drew draw thing",
    "wants want thing",
    "needs need thing",
    "washed wash thing",
    "dropped drop thing",
    "threw throw thing",
    "stole steal thing",
    "built build thing",
    "ate eat food",
    "cooked cook food",
    "bought buy food",
    "tasted taste food",
    "ordered order food",
    "baked bake food",
    "prepared prepare food",
    "wanted want food",
    "met meet person",
    "called call person",
    "visited visit person",
    "helped help person",
    "saw see person",
    "knows know person",
    "married marry person",
    "thanked thank person",
    "phoned phone person",
    "asked ask person",
    "followed follow person",
    "hugged hug person",
    "invited invite person",
    "fed feed animal",
    "saw see animal",
    "caught catch animal",
    "chased chase animal",
    "washed wash animal",
    "painted paint animal",
    "found find animal",
    "heard hear animal",
]
TIMES = ("yesterday", "today", "last week", "this morning", "in the evening", "at night", "on Monday", "on Tuesday", "on Friday", "on Sunday", "in May", "in July", "at noon", "last summer", "in winter", "at six", "last night", "on Saturday", "last year", "this week")  # fmt: skip


def subject(rng: Random) -> tuple[str, str]:
    """Somebody, as the user says it and as the reply does."""
    roll = rng.random()
    if roll < 0.6:
        name = rng.choice(v.NAMES)
        return name, name
    if roll < 0.8:
        kin = rng.choice(
            v.RELATIVES
            + [
                "grandmother",
                "grandfather",
                "grandma",
                "grandpa",
                "dad",
                "mum",
                "dog",
                "cat",
                "team",
                "family",
            ]
        )
        return f"My {kin}", f"Your {kin}"
    job = rng.choice(v.JOBS + ["king", "queen", "old man", "girl", "boy", "woman", "man", "child"])
    return f"The {job}", f"The {job}"


def small(text: str) -> str:
    """A subject inside a sentence."""
    return text if text.split()[0] not in ("My", "Your", "The") else text[0].lower() + text[1:]


def event(rng: Random) -> Fact:
    """SOMEBODY DID SOMETHING, perhaps with a place or a time."""
    past, base, kind = rng.choice(VERBS).split()
    said, told = subject(rng)
    if kind == "thing":
        word = rng.choice(v.THINGS)
        what = rng.choice((f"the {word}", a(word), f"{a(rng.choice(v.COLOURS))} {word}", f"{a(rng.choice(v.KINDS))} {word}", f"{rng.choice(v.NUMBER_WORDS[2:10])} {rng.choice(v.PLURAL_THINGS)}"))  # fmt: skip
    elif kind == "food":
        word = rng.choice(v.FOODS)
        what = word
    elif kind == "animal":
        word = rng.choice(v.PETS)
        what = rng.choice((f"the {word}", a(word)))
    else:
        word = what = rng.choice(v.NAMES)
    roll = rng.random()
    now = past in ("wants", "needs", "knows")
    extra, asks, spot = "", [], ""
    do = "does" if now else "did"
    if roll < 0.25 and not now:
        spot = rng.choice(tuple(v.SPOTS)) if kind != "person" else rng.choice(v.TOWNS)
        extra = f" {v.SPOTS[spot]} the {spot}" if kind != "person" else f" in {spot}"
        asks = [
            f"Where did {small(said)} {base} {what}?|Where was that?|Where did that happen?|In which place did {small(said)} {base} {what}?|Where?|In what place did {small(said)} {base} {what}?"
        ]
    elif roll < 0.5 and not now:
        time = rng.choice(TIMES)
        extra = f" {time}"
        asks = [f"When did {small(said)} {base} {what}?|When was that?|When did that happen?|When?"]
    sentence = f"{told} {past} {what}{extra}."
    who = f"Who {past} {what}?|Who {past} {what}{extra}?|Who was it that {past} {what}?|Tell me who {past} {what}.|Who?|Which person {past} {what}?"
    if kind in ("thing", "food", "animal"):
        things = f"What {do} {small(said)} {base}?|What {do} {small(said)} {base}{extra}?|What was it that {small(said)} {past}?|Which thing {do} {small(said)} {base}?|Tell me what {small(said)} {past}."
        if kind == "animal":
            things += (
                f"|Which animal did {small(said)} {base}?|What animal did {small(said)} {base}?"
            )
        if kind == "food":
            things += f"|Which food did {small(said)} {base}?"
    else:
        things = f"Who {do} {small(said)} {base}?|Whom {do} {small(said)} {base}?|Who was it that {small(said)} {past}?|Tell me who {small(said)} {past}."
    what_did = (
        f"What did {small(said)} do?|What did {small(said)} do{extra}?|What happened?"
        if not now
        else things
    )
    forms = [things, who, *asks, *asks, what_did]
    rng.shuffle(forms)
    lead = rng.choice(
        (
            "",
            "",
            "",
            "Yesterday ",
            "I know that ",
            "I heard that ",
            "It seems that ",
            "We saw that ",
            "Well, ",
            "Look, ",
        )
    )
    if lead == "Yesterday " and (now or extra):
        lead = ""
    start = sentence.replace(told, said, 1).rstrip(".")
    start = f"{lead}{small(start)}." if lead else f"{start}."
    front = (
        f"|{extra.strip().capitalize()} {small(said)} {past} {what}." if extra and not lead else ""
    )
    return Fact("event", start + front, tuple((form, sentence) for form in forms), spot or word)


def state(rng: Random) -> Fact:
    """Who wears, holds, sits, sleeps, waits: what is going on now."""
    said, told = subject(rng)
    roll = rng.random()
    if roll < 0.5:
        verb, base = rng.choice((("is wearing", "wearing"), ("is holding", "holding"), ("is painting", "painting"), ("is eating", "eating"), ("is reading", "reading"), ("is carrying", "carrying"), ("is looking for", "looking for"), ("is cleaning", "cleaning"), ("is cooking", "cooking"), ("is drawing", "drawing")))  # fmt: skip
        word = rng.choice(v.FOODS) if base in ("eating", "cooking") else rng.choice(v.THINGS)
        what = (
            word
            if base in ("eating", "cooking")
            else rng.choice((f"the {word}", a(word), f"{a(rng.choice(v.COLOURS))} {word}"))
        )
        asked = ((f"What is {small(said)} {base}?|What's {small(said)} {base} now?|Tell me what {small(said)} is {base}.", f"{told} {verb} {what}."),
                 (f"Who {verb} {what}?|Who is {base} {what} now?|Which person {verb} {what}?", f"{told} {verb} {what}."))  # fmt: skip
        return Fact(
            "doing",
            f"{said} {verb} {what}.|Now {small(said)} {verb} {what}.|Right now, {small(said)} {verb} {what}.",
            asked,
            word,
        )
    verb, base = rng.choice((("is sleeping", "sleeping"), ("is sitting", "sitting"), ("is waiting", "waiting"), ("is standing", "standing"), ("is working", "working"), ("is playing", "playing"), ("is hiding", "hiding"), ("is", ""), ("stays", "staying"), ("lives", "living")))  # fmt: skip
    spot = rng.choice(tuple(v.SPOTS))
    at = f"{v.SPOTS[spot]} the {spot}"
    do = base if verb.startswith("is") else ""
    ask = f"Where is {small(said)}{' ' + do if do else ''}?|Where is {small(said)} now?|Tell me where {small(said)} is{' ' + do if do else ''}.|Where can I find {small(said)}?"
    if not verb.startswith("is"):
        root = verb[:-1]
        ask = f"Where does {small(said)} {root}?|In which place does {small(said)} {root}?|Tell me where {small(said)} {verb}."
    return Fact("being", f"{said} {verb} {at}.|Now {small(said)} {verb} {at}.", ((ask, f"{told} {verb} {at}."), (f"Who {verb} {at}?|Who is {at}?|Tell me who {verb} {at}.", f"{told} {verb} {at}.")), spot)  # fmt: skip


def listed_keys(rng: Random) -> Fact:
    """Short notes: KEY: VALUE, KEY = VALUE."""
    key = rng.choice(v.NAMES + v.THINGS + v.LABELS + v.EVENTS)
    value = rng.choice((rng.choice(v.COLOURS), rng.choice(v.LABELS), str(rng.randrange(2, 9999)), rng.choice(v.TOWNS), rng.choice(v.FOODS), rng.choice(v.DAYS), rng.choice(v.JOBS)))  # fmt: skip
    sign = rng.choice((": ", " = ", " - ", " is ", "="))
    return Fact("note", f"{key}{sign}{value}.|{key}{sign}{value}", ((f"What is {key}?|What did I say about {key}?|{key}?|What about {key}?|And {key}?|What stands for {key}?|Which word goes with {key}?", f"{key[0].upper()}{key[1:]} is {value}."),
                (f"What is {value}?|Which one is {value}?|Which is {value}?|Who or what is {value}?", f"{key[0].upper()}{key[1:]} is {value}.")), value)  # fmt: skip
