# ruff: noqa: E501 - forms of one meaning a line read better than wrapped ones
"""Dialogues of one to eight turns, as pairs of what a user types and what is right."""

from dataclasses import replace
from random import Random

from chat import sums, talk
from chat import vocabulary as v
from chat.events import event, listed_keys, state
from chat.facts import Fact, pick
from chat.facts import fact as basic
from chat.forms import shows
from chat.grammar import turns
from chat.style import reworded, styled
from chat.twins import twins
from chat.vocabulary import a

Pair = tuple[str, str]
HARD = 0.25  # the share of topics that are learnt last: 0 until step 1,230 of the run that made the shipped weights
WIDE = 0.6  # the share of the others that the grammar writes
LOOSE = ("event", "doing", "being", "note")
# Questions that fit any event, and those with a pronoun: asked where there is one fact only.
GENERAL = frozenset(
    [
        "Who?",
        "When?",
        "Where?",
        "Where was that?",
        "Where did that happen?",
        "When was that?",
        "When did that happen?",
        "What happened?",
    ]
)
SHORT = {
    "colour": "What colour is it?|Which colour is it?|What is its colour?|What colour?|Which colour?|What colour does it have?|So what colour is it?",
    "place": "Where?|So where?|Where do I look?|Where should I look?|Where do I find that?|Where is that?",
    "age": "How old?|How old is that?|What age?|At what age?|How many years?",
    "code": "What is it?|Which digits?|What do I type?|What must I type?|What do I enter?|What should I type in?",
    "price": "How much is it?|How much?|What does it cost?|What is the price?|What do I pay?|How much do I pay?",
    "time": "When?|What time?|At what time?|When is it?|When is that?",
    "day": "When?|When is it?|When is that?|On which day?|When will it be?",
    "pet": "What is it called?|What is its name?|Which name?|What name?|How is it called?|What is the animal called?",
    "count": "How many?|How many are there?|What number?|How many is that?|How many in all?",
    "town": "Where?|Which city?|Which town?|What city?|In which city?",
    "job": "What job?|Which job?|What is the job?|What work?|Which profession?",
    "from": "Which country?|Where from?|What country?|From where?|From which country?",
}  # fmt: skip
FLUFF = """It is sunny today.|I am at home.|The weather is nice.|We went for a walk.|It was a long day.|I have had lunch.|The birds are singing.|This is a short story.|Nothing else happened.|We are in a hurry.|I like this place.|
It is late.|The room is quiet.|Everybody is happy.|It rained all day.|Let me tell you something.|I will tell you a fact.|You should know this.|That was all.|The sun is up.|It is a normal day.""".replace(
    "\n", ""
).split("|")
ACKS = "OK, I will remember that."
NOT_TOLD = "I do not know that. You have not told me."


def fact(rng: Random) -> Fact:
    """Return a fact of any kind."""
    return rng.choices((basic, event, state, listed_keys), (0.66, 0.2, 0.09, 0.05))[0](rng)


def asked(rng: Random, told: Fact, first: float = 0.65) -> Pair:
    """Return a question about a fact: mostly the first kind, sometimes one that is answered with yes or no."""
    roll = rng.random()
    if told.checked and roll < 0.22:
        forms, true, value, wrong = told.checked
        yes = rng.random() < 0.5
        said = value if yes else rng.choice(wrong)
        form = pick(rng, forms).format(said)
        if said[0] in "aeiou" and " a " + said in form:
            form = form.replace(" a " + said, " an " + said)
        if rng.random() < 0.12:
            form += pick(rng, " Yes or no?| Answer yes or no.| Is that right?")
        return reworded(rng, form), f"{'Yes' if yes else 'No'}, {true}."
    forms, answer = told.asked[0] if rng.random() < first else rng.choice(told.asked)
    form = pick(rng, forms)
    if forms is told.asked[0][0] and roll > 0.92 and told.kind not in LOOSE:
        short = told.value[0].upper() + told.value[1:] + "."
        return form + pick(rng, " Answer with one word.| One word.| Just one word."), short
    return reworded(rng, form), answer


def specific(told: Fact) -> Fact:
    """Return a fact without the questions that would fit others, too."""
    kept = [
        ("|".join(q for q in forms.split("|") if q not in GENERAL), answer)
        for forms, answer in told.asked
    ]
    return replace(told, asked=tuple(pair for pair in kept if pair[0]))


def distinct(rng: Random, n: int, make=fact) -> list[Fact]:
    """Facts that do not answer one another's questions."""
    out: list[Fact] = []
    while len(out) < n:
        new = make(rng) if n == 1 else specific(make(rng))
        questions = {q for forms, _ in new.asked for q in forms.split("|")}
        if all(
            questions.isdisjoint(q for forms, _ in old.asked for q in forms.split("|"))
            for old in out
        ):
            out.append(new)
    return out


def same_kind(rng: Random, n: int) -> list[Fact]:
    """Facts of one kind, so that each has to be told from the others."""
    kind = fact(rng).kind
    out: list[Fact] = []
    tries = 0
    while len(out) < n:
        tries += 1
        new = specific(fact(rng))
        if (new.kind == kind or tries > 400) and all(
            {q for forms, _ in new.asked for q in forms.split("|")}.isdisjoint(
                q for forms, _ in old.asked for q in forms.split("|")
            )
            for old in out
        ):
            out.append(new)
    return out


def say(rng: Random, told: Fact) -> str:
    return pick(rng, told.said)


def joined(rng: Random, said: list[str]) -> str:
    """Join sentences to a text; sometimes two of them to one."""
    out = said[:1]
    for sentence in said[1:]:
        if rng.random() < 0.15 and out[-1].endswith("."):
            word = rng.choice((" and ", ", and ", ", but ", " while ", "; ", ", "))
            starts = sentence.split()[0]
            small = starts in (
                "The",
                "My",
                "There",
                "We",
                "Our",
                "It",
                "You",
                "This",
                "Please",
                "Remember:",
                "Now",
                "Right",
            )
            out[-1] = (
                out[-1][:-1] + word + (sentence[0].lower() + sentence[1:] if small else sentence)
            )
        else:
            out.append(sentence)
    return " ".join(out)


def in_prompt(rng: Random) -> list[Pair]:
    """Some facts and a question in one turn, then perhaps more questions."""
    n = rng.choices((1, 2, 3, 4, 6), (0.3, 0.28, 0.24, 0.12, 0.06))[0]
    facts = distinct(rng, n) if n == 1 or rng.random() < 0.45 else same_kind(rng, n)
    said = [say(rng, f) for f in facts]
    if rng.random() < 0.15:
        said.insert(rng.randrange(len(said) + 1), rng.choice(FLUFF))
    text = joined(rng, said)
    if rng.random() < 0.08:
        other = fact(rng)
        question, answer = pick(rng, other.asked[0][0]), NOT_TOLD
        names = [w for w in question.replace("?", "").replace("'s", "").split() if w in text]
        if len(names) > 3:
            question, answer = asked(rng, facts[0])
    elif n == 1 and facts[0].kind in SHORT and rng.random() < 0.2:
        question, answer = pick(rng, SHORT[facts[0].kind]), facts[0].asked[0][1]
    else:
        question, answer = asked(rng, rng.choice(facts))
    gap = rng.choices((" ", "\n", "\n\n", ", "), (0.82, 0.07, 0.06, 0.05))[0]
    if gap == ", ":
        text = text.rstrip(".")
    lead = rng.choices(
        ("", "Read this: ", "Here are some facts: ", "Listen: ", "Fact: "),
        (0.88, 0.03, 0.03, 0.03, 0.03),
    )[0]
    pairs = (
        [(f"{lead}{text}{gap}{question}", answer)]
        if rng.random() < 0.96
        else [(f"{question} {text}", answer)]
    )
    for _ in range(rng.choices((0, 1, 2), (0.5, 0.35, 0.15))[0]):
        pairs.append(asked(rng, rng.choice(facts)))
    return pairs


def told_apart(rng: Random) -> list[Pair]:
    """Facts that differ in one thing, in one turn or in several, and questions about some of them."""
    facts, said = twins(rng)
    pairs: list[Pair] = []
    if rng.random() < 0.3:
        pairs = [(text, ACKS) for text in said]
        pairs += one(rng) if rng.random() < 0.2 else []
        pairs.append(asked(rng, rng.choice(facts)))
    else:
        question, answer = asked(rng, rng.choice(facts))
        pairs.append((f"{joined(rng, said)} {question}", answer))
    for _ in range(rng.choice((0, 1, 1, 2))):
        pairs.append(asked(rng, rng.choice(facts)))
    return pairs


def remembered(rng: Random) -> list[Pair]:
    """Told in one turn or several, asked in a later one; sometimes corrected."""
    facts = distinct(rng, rng.choice((1, 1, 2, 2, 3)))
    pairs: list[Pair] = []
    for told in facts:
        lead = rng.choices(
            ("", "Remember this: ", "Please remember: ", "Remember that ", "FYI: "),
            (0.8, 0.06, 0.06, 0.04, 0.04),
        )[0]
        pairs.append((lead + say(rng, told), ACKS))
    if rng.random() < 0.35:
        pairs += one(rng)
    at = rng.randrange(len(facts))
    if facts[at].changed and rng.random() < 0.6:
        if rng.random() < 0.3:
            pairs.append(asked(rng, facts[at], 1.0))
        pairs.append((say(rng, facts[at].changed), ACKS))
        facts[at] = facts[at].changed
        pairs.append(asked(rng, facts[at], 1.0))
    for _ in range(rng.choice((1, 1, 2))):
        pairs.append(asked(rng, rng.choice(facts)))
    return pairs


def about_user(rng: Random) -> list[Pair]:
    """What users tell about themselves."""
    name, town, job = rng.choice(v.NAMES), rng.choice(v.TOWNS), rng.choice(v.JOBS)
    pet, pet_name, hue, food = (
        rng.choice(v.PETS),
        rng.choice(v.PET_NAMES),
        rng.choice(v.COLOURS),
        rng.choice(v.FOODS),
    )
    age, kin, other, day = (
        rng.randrange(5, 90),
        rng.choice(v.RELATIVES),
        rng.choice(v.NAMES),
        rng.choice(v.MONTHS),
    )
    topics = (
        (f"My name is {name}.|I am {name}.|I'm {name}.|Call me {name}.|You can call me {name}.|Hi, I am {name}.|Hello, my name is {name}.|Hi, my name is {name}.|hey i'm {name}|This is {name}.|People call me {name}.",
         "What is my name?|Who am I?|What's my name?|Do you remember my name?|Do you know my name?|Can you tell me my name?|Tell me my name.|What am I called?|What was my name?|What is my name again?|Say my name.|Do you still know my name?",
         f"Your name is {name}.", f"Nice to meet you, {name}!"),
        (f"I live in {town}.|My home is in {town}.|I am in {town}.|I live in the city of {town}.", "Where do I live?|What city do I live in?|Where is my home?|In which city do I live?|Do you remember where I live?|Tell me where I live.|Which town do I live in?",
         f"You live in {town}.", ACKS),
        (f"I am {a(job)}.|I work as {a(job)}.|My job is {job}.|I'm {a(job)}.", "What is my job?|What do I do?|What do I work as?|What do I do for a living?|Do you remember my job?|What's my job?|What is my profession?", f"You are {a(job)}.", ACKS),
        (f"I have {a(pet)} called {pet_name}.|My {pet} is called {pet_name}.|My {pet}'s name is {pet_name}.|I have {a(pet)} named {pet_name}.|I have {a(pet)}. Its name is {pet_name}.|I have {a(pet)}. It is called {pet_name}.",
         f"What is my {pet} called?|What is the name of my {pet}?|What's my {pet}'s name?|Do you remember the name of my {pet}?|What is my pet called?|How is my {pet} called?|What is the {pet} called?|Tell me the name of my {pet}.", f"Your {pet} is called {pet_name}.", ACKS),
        (f"I have {a(pet)}.|My pet is {a(pet)}.", "What pet do I have?|Which animal do I have?|What animal do I have?|What is my pet?|What kind of pet do I have?", f"You have {a(pet)}.", ACKS),
        (f"My favourite colour is {hue}.|I like {hue} best.|The colour I like best is {hue}.", "What is my favourite colour?|Which colour do I like?|What colour do I like?|What's my favourite colour?|Which colour is my favourite?|Do you remember my favourite colour?", f"Your favourite colour is {hue}.", ACKS),
        (f"I like {food}.|I love {food}.|My favourite food is {food}.", "What do I like?|What food do I like?|What is my favourite food?|What do I love?|Which food do I like?|What do I like to eat?", f"You like {food}.", ACKS),
        (f"I am {age} years old.|I am {age}.|I'm {age} years old.|My age is {age}.|I'm {age}", "How old am I?|What is my age?|What's my age?|Do you remember how old I am?|Tell me my age.", f"You are {age} years old.", ACKS),
        (f"My {kin} is called {other}.|My {kin}'s name is {other}.|{other} is my {kin}.|I have a {kin} called {other}.|My {kin} is {other}.", f"What is my {kin} called?|What is the name of my {kin}?|Who is my {kin}?|What is my {kin}'s name?|Who is {other}?", f"Your {kin} is {other}.", ACKS),
        (f"My birthday is in {day}.|I was born in {day}.", "When is my birthday?|When was I born?|In which month was I born?|Which month is my birthday in?", f"Your birthday is in {day}.", ACKS),
    )  # fmt: skip
    chosen = rng.sample(topics, rng.choice((1, 1, 2, 3)))
    pairs = [(pick(rng, t[0]), t[3]) for t in chosen]
    if len(pairs) > 1 and rng.random() < 0.4:
        pairs = [(" ".join(p[0].rstrip(".") + "." for p in pairs), pairs[0][1])]
    elif rng.random() < 0.25:  # told and asked in one turn
        said, question, answer, _ = chosen[0]
        return [(f"{pick(rng, said).rstrip('.')}. {pick(rng, question)}", answer)]
    if rng.random() < 0.4:
        pairs += one(rng)
    for _, question, answer, _ in rng.sample(chosen, len(chosen)):
        if " is " in answer or "You" in answer:
            pairs.append((reworded(rng, pick(rng, question)), answer))
    if rng.random() < 0.16:
        new = rng.choice(v.NAMES)
        pairs += [
            (
                pick(
                    rng,
                    f"No, my name is {new}.|Sorry, my name is {new}.|Now call me {new}.|Actually, my name is {new}.",
                ),
                f"Nice to meet you, {new}!",
            ),
            (pick(rng, topics[0][1]), f"Your name is {new}."),
        ]
    if rng.random() < 0.12:
        left = [
            t for t in topics if t not in chosen and t[1] != topics[4][1] and t[1] != topics[3][1]
        ]
        t = rng.choice(left)
        if chosen[0] is not topics[0] or t is not topics[0]:
            pairs.append(
                (pick(rng, t[1]).replace(f"Who is {other}?", "Where do I work?"), NOT_TOLD)
            )
    return pairs


def given(rng: Random) -> list[Pair]:
    """Who has it now; who is taller: two steps of thought."""
    x, y, z = rng.sample(v.NAMES, 3)
    thing = rng.choice(v.THINGS)
    roll = rng.random()
    if roll < 0.4:
        text = pick(
            rng,
            f"{x} gave the {thing} to {y}.|{x} has {a(thing)}. {x} gives the {thing} to {y}.|{x} gave {y} the {thing}.|{x} sold the {thing} to {y}.|{y} got the {thing} from {x}.|{y} took the {thing} from {x}.",
        )
        if rng.random() < 0.3:
            text += pick(
                rng,
                f" Then {y} gave the {thing} to {z}.| {y} gave it to {z}.| Then {y} gave it to {z}.",
            )
            x, y = y, z
        if rng.random() < 0.25 and "got" not in text and "took" not in text:
            return [
                (
                    f"{text} {pick(rng, f'Who gave the {thing} to {y}?|Who had the {thing} before {y}?')}",
                    f"{x} gave the {thing} to {y}." if True else "",
                )
            ]
        return [
            (
                f"{text} {pick(rng, f'Who has the {thing} now?|Who has the {thing}?|Who owns the {thing} now?|Who got the {thing}?')}",
                f"{y} has the {thing}.",
            )
        ]
    more, most, less = rng.choice(
        (
            ("taller", "tallest", "shorter"),
            ("older", "oldest", "younger"),
            ("bigger", "biggest", "smaller"),
            ("faster", "fastest", "slower"),
            ("stronger", "strongest", "weaker"),
            ("richer", "richest", "poorer"),
        )
    )
    if roll < 0.75:
        ask, right = rng.choice(
            (
                (
                    f"Who is {more}, {x} or {y}?|Who is {more}?|Who is the {more} one?|Which of them is {more}?",
                    f"{x} is {more}.",
                ),
                (
                    f"Who is {less}?|Who is {less}, {y} or {x}?|Who is {less}, {x} or {y}?",
                    f"{y} is {less}.",
                ),
                (f"Is {x} {more} than {y}?", f"Yes, {x} is {more} than {y}."),
                (f"Is {y} {more} than {x}?", f"No, {x} is {more} than {y}."),
            )
        )
        return [(f"{x} is {more} than {y}. {pick(rng, ask)}", right)]
    return [
        (
            f"{x} is {more} than {y}. {y} is {more} than {z}. Who is the {most}?",
            f"{x} is the {most}.",
        )
    ]


def one(rng: Random) -> list[Pair]:
    """One question that needs no fact of the dialogue."""
    roll = rng.random()
    if roll < 0.42:
        return [sums.ask(rng)]
    if roll < 0.66:
        question, answer = talk.knowledge(rng)
        return [(reworded(rng, question), answer)]
    if roll < 0.77:
        return [talk.about_self(rng)]
    if roll < 0.85:
        return [talk.small_talk(rng)]
    if roll < 0.93:
        return [talk.beyond(rng)]
    return [talk.order_to(rng)]


def dialogue(rng: Random) -> list[Pair]:
    """Return a dialogue of the training, none of whose turns is worded as a kept back form."""
    while True:
        pairs = any_dialogue(rng)
        if not any(shows(user) for user, _ in pairs):
            return pairs


def any_dialogue(rng: Random) -> list[Pair]:
    """Return a dialogue: one topic or several."""
    pairs: list[Pair] = [talk.small_talk(rng)] if rng.random() < 0.1 else []
    for _ in range(rng.choices((1, 2, 3), (0.6, 0.27, 0.13))[0]):
        if rng.random() < HARD:
            pairs += turns.hard(rng)
            continue
        if rng.random() < WIDE:
            pairs += turns.dialogue(rng)
            continue
        roll = rng.random()
        if roll < 0.16:
            pairs += told_apart(rng)
        elif roll < 0.33:
            pairs += in_prompt(rng)
        elif roll < 0.45:
            pairs += remembered(rng)
        elif roll < 0.53:
            pairs += about_user(rng)
        elif roll < 0.57:
            pairs += given(rng)
        else:
            pairs += one(rng)
    return styled(rng, pairs)
