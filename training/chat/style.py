# ruff: noqa: E501, SIM905 - forms of one meaning a line read better than wrapped ones
"""How people type: no capitals, no punctuation, capitals only, slips, American spelling, polite words."""

import re
from random import Random

Pair = tuple[str, str]
AMERICAN = (
    ("colour", "color"),
    ("favourite", "favorite"),
    ("grey", "gray"),
    ("neighbour", "neighbor"),
    ("harbour", "harbor"),
    ("theatre", "theater"),
)
SHORT = (
    ("What is ", "What's "),
    ("Where is ", "Where's "),
    ("Who is ", "Who's "),
    ("I am ", "I'm "),
    ("do not", "don't"),
    ("When is ", "When's "),
    ("what is ", "what's "),
    ("It is ", "It's "),
)
BEFORE = (
    "Please tell me: ",
    "Question: ",
    "So, ",
    "Hey, ",
    "Now tell me: ",
    "OK, ",
    "And ",
    "Quick question: ",
    "I have a question: ",
    "Hi, ",
    "Well, ",
    "Let me ask: ",
    "Next question: ",
    "Tell me: ",
    "Hello! ",
    "Hmm, ",
    "Then ",
    "I wonder, ",
    "Listen, ",
    "Say, ",
    "Hey you, ",
    "Good. ",
    "Dear model, ",
    "Could you tell me: ",
    "My question: ",
    "Help me: ",
    "One more thing: ",
    "Answer me: ",
    "Just asking: ",
)
AFTER = (
    " Please.",
    " please",
    " Thanks.",
    " Thank you!",
    " pls",
    " :)",
    "?",
    "??",
    "!",
    " Can you tell me?",
    " Do you know?",
    " please?",
    " thanks",
)

WORD = re.compile(r"\b[a-z]{4,}\b")  # no name, no number
# How words sound, for those who write them so.
SOUND = (
    ("what", "wat|wot|whut|waht"), ("where", "were|wher|whare"), ("who", "hoo|woh"), ("which", "wich|witch"), ("there", "thare|ther"),
    ("friend", "frend|freind"), ("hello", "helo|hallo|hellow"), ("thanks", "thx|thanx|thank"), ("please", "pls|plz|pleas"), ("you", "u|yu|yuo"),
    ("are", "r|ar"), ("your", "ur|yor|youre"), ("have", "hav"), ("live", "liv"), ("colour", "culor|color|coler"), ("favourite", "favorit|favrite"),
    ("because", "cuz|becos"), ("know", "no|kno"), ("people", "peple"), ("capital", "capitol|captial|kapital"), ("before", "befor|b4"), ("after", "aftr"),
    ("does", "dose|dos"), ("day", "dey"), ("name", "naem|nam"), ("number", "numbr|nummer"), ("tomorrow", "tomorow"), ("birthday", "brithday"),
    ("two", "tow|tu"), ("three", "tree|thre"), ("four", "for|fore"), ("five", "fiv"), ("seven", "sevn"), ("eight", "ate|eigt"), ("nine", "nin"),
    ("plus", "pluss|plas"), ("minus", "mines|minnus"), ("times", "timse"), ("count", "cuont|kount"), ("animal", "animl"), ("called", "caled|cald"),
    ("remember", "rember|remeber"), ("tell", "tel"), ("me", "mee"), ("is", "iz|si"), ("the", "teh|th|da"), ("and", "adn|n|an"), ("how", "hwo|hau"),
    ("many", "meny|mny"), ("good", "gud|goood"), ("morning", "mornin|moring"),
)  # fmt: skip


NOUN = re.compile(
    r"^(?:What|Who|Which|what|who) (?:is|are) ((?:the|my|[A-Z][a-z]+'s) (?![^?]*called)[^?]+)\?$"
)
WHERE = re.compile(r"^(Where|When) (is|are) ((?:the|my) [^?]+)\?$")
NOUN_FORMS = (
    "Give me {}.|Tell me {}.|{}?|{}?|{}, please.|I need {}.|Name {}.|{} is?|And {}?|What about {}?|I want to know {}.|Can you give me {}?"
    "|Do you know {}?|I forgot {}.|I need to know {}.|Please give me {}.|Please tell me {}.|Could you tell me {}?|Say {}.|I would like to know {}."
    "|Do you remember {}?|What was {} again?|What might {} be?|So {} is what?|Let me know {}."
).split("|")


def reworded(rng: Random, question: str) -> str:
    """Return the question as an order, as a noun, or with its parts turned round, where that is easy."""
    if rng.random() > 0.16:
        return question
    if m := NOUN.match(question):
        text = rng.choice(NOUN_FORMS).format(m.group(1))
        return text[0].upper() + text[1:]
    if m := WHERE.match(question):
        where, be, what = m.group(1).lower(), m.group(2), m.group(3)
        new = rng.choice((f"{what} {be} {where}?", f"{what} {be} {where} exactly?", f"I want to know {where} {what} {be}.", f"I forgot {where} {what} {be}.", f"Say {where} {what} {be}.", f"{what}: {where}?", f"Do you remember {where} {what} {be}?", f"{where} exactly {be} {what}?", f"Please say {where} {what} {be}.", f"Please find {what}.", f"And {what}?"))  # fmt: skip
        return new[0].upper() + new[1:]
    if question.endswith("?") and "." not in question:
        small = question[0].lower() + question[1:-1]
        new = rng.choice((f"{small}, please?", f"I ask: {small}?", f"Can you say {small}?" if not small.startswith(("is", "are", "does", "do", "can", "has")) else f"{small}, or not?",
                          f"{small} then?", f"So, {small}?", f"Now {small}?", f"{small}, do you know?", f"Do you know: {small}?", f"OK, {small}?", f"By the way, {small}?", f"I am asking you: {small}?"))  # fmt: skip
        return new[0].upper() + new[1:]
    return question


def american(text: str) -> str:
    for british, other in AMERICAN:
        text = text.replace(british, other).replace(british.capitalize(), other.capitalize())
    return text


def slip(rng: Random, text: str) -> str:
    """Return the text with a letter doubled, dropped or swapped in a small word that is no name."""
    spots = list(WORD.finditer(text))
    if not spots:
        return text
    m = rng.choice(spots)
    word, i = m.group(), rng.randrange(1, len(m.group()) - 1)
    new = rng.choice(
        (
            word[:i] + word[i + 1 :],
            word[:i] + word[i] + word[i:],
            word[:i] + word[i + 1] + word[i] + word[i + 2 :],
        )
    )
    return text[: m.start()] + new + text[m.end() :]


SMALL = re.compile(r" (?:the|a|an|is|are|of|do|does|please|to|at|in|that)(?= )")


def thinned(rng: Random, text: str) -> str:
    """Return the text without one or two of its small words."""
    for _ in range(rng.choice((1, 1, 2))):
        if spots := list(SMALL.finditer(text)):
            m = rng.choice(spots)
            text = text[: m.start()] + text[m.end() :]
    return text


def by_ear(rng: Random, text: str, share: float) -> str:
    """Return the text with small words written as they sound."""
    for word, ways in SOUND:
        if rng.random() < share and re.search(rf"\b{word}\b", text, re.I):
            text = re.sub(rf"\b{word}\b", rng.choice(ways.split("|")), text, flags=re.I)
    return text


def styled(rng: Random, pairs: list[Pair]) -> list[Pair]:
    """Return the dialogue as one person types it."""
    us = rng.random() < 0.45
    roll = rng.random()
    short = rng.random() < 0.2
    bare = rng.random() < 0.5
    ear, loud = rng.random() < 0.08, rng.random() < 0.06
    thin = rng.random() < 0.06
    out = []
    for user, answer in pairs:
        text = user
        if us:
            text, answer = american(text), american(answer)
        if short and rng.random() < 0.8:
            for long, brief in SHORT:
                text = text.replace(long, brief)
        question = text.endswith("?") and "." not in text
        if question and rng.random() < 0.12:
            lead = rng.choice(BEFORE)
            text = lead + (
                text[0].lower() + text[1:]
                if lead[-2] in ",:d" and not text.startswith("I ")
                else text
            )
        if rng.random() < 0.06 and text[-1] in ".?":
            after = rng.choice(AFTER)
            text = (
                text if after[0] in "?!" or after[1].isupper() or after == " :)" else text[:-1]
            ) + after
        if rng.random() < 0.07:
            text = slip(rng, text)
            text = slip(rng, text) if rng.random() < 0.3 else text
        if ear:
            text = by_ear(rng, text, 0.6)
        if thin and '"' not in text and not re.match(r"(?i)(say|repeat|write|type)", text):
            text = thinned(rng, text)
        if roll < 0.10:
            text = text.lower()
        elif roll < 0.24:
            text = re.sub(r"[?!,;]|\.(?=\s|$)", "", text.lower()) or text
            text = text.replace("'", "") if bare else text
        elif roll < 0.30:
            text = text.rstrip("?.!") or text
        elif roll < 0.34:
            text = re.sub(r"[?!]|\.(?=\s|$)", "", text) or text
        elif roll < 0.42 or (loud and len(text) < 70):
            text = text.upper()
        elif roll < 0.44:
            text = text.lower().replace("'", "").replace("you ", "u ").replace("please", "pls")
            text = text.replace("your ", "ur ").replace("are ", "r ") if bare else text
            text = text.replace("what is", "whats").replace("?", "")
        elif roll < 0.465:
            text = text.replace(". ", ".\n")
        out.append((text, answer))
    return out
