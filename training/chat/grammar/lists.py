# ruff: noqa: E501, SIM905 - phrases of one meaning a line read better than wrapped ones
"""Facts written as notes and lists, sentences that wait for their end, and words of a place before a question."""

from random import Random

from chat import talk
from chat import vocabulary as v
from chat.facts import Fact
from chat.grammar.known import COLOURS, COUNTS, GIVES, OPPOSITES
from chat.grammar.phrases import one_of, slot, tidy
from chat.vocabulary import a
from mlxkv.texts.worlds import words as worlds

Pair = tuple[str, str]
# what stands left, what stands right, how the left one is asked for, how the right one is asked for, what is true
NOTES = (
    ("day", "event", "when is the {r}?|the {r} is on (which|what) day?|on (which|what) day is the {r}?|(which|what) day has the {r}?|(what|which) day is for the {r}?", "what (is|do i have|happens|do we do|is planned|is written) on {l}?|{l} is for what?|{l} is the day of what?|what does {l} bring?|(which|what) (plan|event) (is|stands|belongs) (on|to) {l}?", "The {r} is on {l}."),
    ("n", "c", "who (has|took|wears|likes|chose) {r}?|{r} belongs to (whom|who)?|whose colour is {r}?", "(what|which) colour (has|does) {l}( have|)?|{l} has (what|which) colour?|the colour of {l}?|{l}'s colour?", "{l} has {r}."),
    ("n", "town", "who (lives|is|works) in {r}?|(which|what) (person|one) is in {r}?|{r} is the home of (whom|who)?", "where (is|lives) {l}?|{l} (is|lives) in (which|what) (town|city)?|(which|what) (town|city) stands (by|after|for) {l}?|{l}'s (town|city)?", "{l} lives in {r}."),
    ("n", "job", "who is the {r}?|the {r} is who?|(which|what) (person|one) is the {r}?|(which one|who) works as a {r}?", "what is {l}('s job|)?|{l} is what?|{l}'s (job|work|profession)?|(what|which) job (has|does) {l}( do|)?", "{l} is a {r}."),
    ("n", "num", "who is {r}( years old|)?|{r} is the age of (whom|who)?|(which|what) (person|one) is {r}?", "how old is {l}?|{l} is how old?|{l}'s age?|the age of {l}?", "{l} is {r} years old."),
    ("n", "food", "who (ate|eats|gets|ordered|wants|likes|has) (the |){r}?|(the |){r} (is|are) for (whom|who)?|(which|what) (guest|person|one) (ordered|eats|wants) (the |){r}?", "what (did|does) {l} (eat|order|get|want|have)?|{l} (eats|ordered|gets) what?|{l}'s (food|order|meal)?|what (is|are) for {l}?", "{l} eats {r}."),
    ("clock", "event", "when is the {r}?|at (what|which) time is the {r}?|the {r} (is|begins) (when|at what time)?", "what (is|happens|do i have|begins) at {l}?|(which|what) (plan|event) (is|begins) at {l}?|{l} is the time of what?", "The {r} is at {l}."),
    ("t", "price", "what (costs|is sold for) {r}?|(which|what) thing costs {r}?|{r} is the price of what?", "how much is the {l}?|what does the {l} cost?|the price of the {l}?|the {l} costs (what|how much)?", "The {l} costs {r}."),
    ("house", "digits", "(which|what) (place|house) has {r}?|{r} is the number of (what|which place)?", "what is the number of the {l}?|the number of the {l}?|(which|what) number has the {l}?|the {l} has (which|what) number?", "The number of the {l} is {r}."),
)  # fmt: skip
SIGNS = (": ", ": ", ": ", " - ", " = ", " -> ")
ENDS = (". ", ". ", ", ", "\n", "; ")
HEADS = (
    "",
    "",
    "",
    "Notes: ",
    "My list: ",
    "List:\n",
    "The plan: ",
    "Here is a list: ",
    "I wrote: ",
)
PETS = "two (pets|animals) (live|are) with us: {x} and {y}.|we (have|own|keep|feed) {x} and {y}.|in this house live {x} and {y}.|my (pets|animals) are {x} and {y}.|{x} and {y} are (our|my) pets.|at home i have {x} and {y}.|this is {x}, and that is {y}.|{x} plays with {y}.|{x} sleeps, {y} is awake."
KIND = "what (animal|kind of animal|sort of pet|pet) is {}?|what is {}?|{} is a what?|is {} a {p} or a {p2}?|is {} a {p2} or a {p}?|{} is what kind of animal?|(tell me|say) what {} is.|{} is the name of (what|which pet)?"
NAMED = "(what|how) is the {p} called?|(what|which) is the name of the {p}?|the {p}'s name?|who is the {p}?|(which|what) name has the {p}?|the {p} is called (what|how)?|the name of the {p} (is|)?|(which|who) of them is the {p}?"
SCENES = "(in|from|near|outside|behind|at) (my|our|the|this|your|an old) (house|kitchen|street|school|village|car|train|office|room|balcony|desk|hotel|boat|farm|bed|park),|as (we|people|children|you|they) (all |)(know|learn|say|see|believe),|on a (normal|sunny|rainy|cold|busy) (day|morning|evening),|while (we|you|they|the others) (wait|walk|eat|work|rest|talk),|before (i|we|you) (go|leave|sleep|eat|begin),|for (my|our|the|a) (homework|quiz|son|daughter|notes|friend|game|test|report),|here on earth,|in general,|to be exact,|in (simple|plain|short|a few) words,|in (your|my) (view|opinion|head|book),|if you (ask|look|think|try|care|read books),|without (thinking|a book|help|looking),|between friends,|for (once|fun|now|a start),|after (work|school|dinner|a walk),|with (closed eyes|some luck|a smile|your help),|only to be sure,|looking (up|around|out of the window),|asked by (a child|a friend|my boss|my mother),|from (above|far away|close by),"


def note(rng: Random, row: tuple, left: str, right: str) -> Fact:
    """Return one line of a list as a fact."""
    words = {"{l}": left, "{r}": right}

    def fill(text: str) -> str:
        for name, word in words.items():
            text = text.replace(name, word)
        return text

    answer = tidy(fill(row[4]).replace("is a a", "is an a").replace(" a e", " an e").replace(" a o", " an o"))  # fmt: skip
    ask = tuple(("|".join(one_of(rng, fill(forms)) for _ in range(3)), answer) for forms in row[2:4])  # fmt: skip
    return Fact("note", "", ask, right)


def notes(rng: Random) -> list[Pair]:
    """Return two to four lines of a list, and questions about some of them, by what stands left or right."""
    row = rng.choice(NOTES)
    n = rng.choice((2, 2, 3, 3, 4))
    lefts: list[str] = []
    rights: list[str] = []
    for name, held in ((row[0], lefts), (row[1], rights)):
        while len(held) < n:
            word = slot(rng, name)
            if word not in (*lefts, *rights):
                held.append(word)
    turned = rng.random() < 0.3
    sign, end = rng.choice(SIGNS), rng.choice(ENDS)
    lines = [f"{r}{sign}{x}" if turned else f"{x}{sign}{r}" for x, r in zip(lefts, rights, strict=True)]  # fmt: skip
    if end == ". ":
        lines = [tidy(line) for line in lines]
    facts = [note(rng, row, x, r) for x, r in zip(lefts, rights, strict=True)]
    text = rng.choice(HEADS) + end.join(lines)
    ask = lambda: _asked(rng, rng.choice(facts))  # noqa: E731
    question, answer = ask()
    gap = "\n" if end == "\n" else ". " if end in (". ", ", ", "; ") else " "
    pairs = [(f"{text}{gap}{question}", answer)]
    if rng.random() < 0.25:
        pairs = [(text + ("" if end == "\n" else "."), "OK, I will remember that."), (question, answer)]  # fmt: skip
    return pairs + [ask() for _ in range(rng.choice((0, 1, 1, 2)))]


def _asked(rng: Random, told: Fact) -> Pair:
    forms, answer = rng.choice(told.asked)
    return rng.choice(forms.split("|")), answer


def pets(rng: Random) -> list[Pair]:
    """Return two animals with names, and what each is, or what it is called."""
    p, p2 = rng.sample(v.PETS, 2)
    x, y = rng.sample(v.PET_NAMES, 2)
    named = rng.choice(("the {p} {x}", "{x} the {p}", "a {p} called {x}", "{x}, a {p}", "a {p} named {x}"))  # fmt: skip
    first, second = (named.replace("{p}", kind).replace("{x}", name) for kind, name in ((p, x), (p2, y)))  # fmt: skip
    text = one_of(rng, PETS.replace("{x}", first).replace("{y}", second))

    def ask() -> Pair:
        kind, name = rng.choice(((p, x), (p2, y)))
        if rng.random() < 0.6:
            forms = KIND.replace("{}", name).replace("{p}", p).replace("{p2}", p2)
            return one_of(rng, forms), f"{name} is {a(kind)}."
        return one_of(rng, NAMED.replace("{p}", kind)), f"The {kind} is called {name}."

    question, answer = ask()
    return [(f"{text} {question}", answer), *(ask() for _ in range(rng.choice((0, 1, 1))))]


def unfinished(rng: Random) -> Pair:
    """Return a sentence that lacks its end, and the whole of it."""
    stop = rng.choice(("", "...", " ...", "?", "...?", " ___", " what?", ":"))
    roll = rng.random()
    if roll < 0.2:
        x, hue = rng.choice(tuple(COLOURS.items()))
        return tidy(f"{rng.choice(('', '', 'the colour of '))}{x} is{stop}"), tidy(f"{x} is {hue}.")
    if roll < 0.4:
        whole, part, answer = rng.choice(COUNTS)
        if not answer.split()[-2].isdigit():
            return unfinished(rng)
        return tidy(f"the {part} of {a(whole)} are{stop}" if rng.random() < 0.3 else f"the number of {part} {a(whole)} has is{stop}"), answer  # fmt: skip
    if roll < 0.6:
        x, y = rng.choice(tuple(OPPOSITES.items()))
        return tidy(rng.choice((f"the opposite of {x} is{stop}", f"{x} is the opposite of{stop}", f"not {x} but{stop}", f"when it is not {x}, then it is{stop}", f"what is not {x} is{stop}"))), f"The opposite of {x} is {y}."  # fmt: skip
    if roll < 0.75:
        land, town = rng.choice(tuple(worlds.CAPITALS.items()))
        return tidy(rng.choice((f"the capital of {land} is{stop}", f"{land} has the capital{stop}", f"{land}'s capital is{stop}"))), f"The capital of {land} is {town}."  # fmt: skip
    if roll < 0.9:
        x, y = rng.choice(tuple(talk.SOUNDS.items()))
        return tidy(rng.choice((f"{a(x)} says{stop}", f"the {x} says{stop}", f"the {x} goes{stop}", f"{a(x)} makes the sound{stop}", f"the sound of {a(x)} is{stop}"))), f"{a(x).capitalize()} says {y}."  # fmt: skip
    many, one, do, _, answer = rng.choice(GIVES)
    return tidy(rng.choice((f"{many} {do}{stop}", f"{a(one)} gives us{stop}", f"from {many} we get{stop}"))), answer  # fmt: skip


def placed(rng: Random, question: str) -> str:
    """Return a question with a place, an occasion or a manner in front that does not matter."""
    small = question[0].lower() + question[1:] if question.split()[0] in FIRST else question
    return tidy(f"{one_of(rng, SCENES)} {small}")


FIRST = frozenset("What Which Who Whom How Is Are Can Does Do Has Where When Why Name Tell Say Count The A An In If Of".split())  # fmt: skip
