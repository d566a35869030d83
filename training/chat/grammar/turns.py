# ruff: noqa: E501 - phrases of one meaning a line read better than wrapped ones
"""Dialogues of the grammar: told and asked at once or later, several of one frame, corrected, moved, not told."""

from random import Random

from chat import vocabulary as v
from chat.facts import Fact, owned, pick
from chat.grammar import frames, known, lists, me, small, sums
from chat.grammar.asking import lower, reworded
from chat.grammar.clauses import clause
from chat.grammar.phrases import SLOT, filled, one_of, slot, tidy
from chat.vocabulary import a

Pair = tuple[str, str]
JOIN = (". ", ". ", ". ", ", and ", " and ", ", but ", ", while ", "; ", ", ", " whereas ")
GAP = (" ", " ", " ", " ", " ", " ", " ", "\n", "\n\n", " Now: ", " Question: ", " So: ", " - ")


def question(rng: Random, told: Fact, first: float = 0.5) -> Pair:
    """Return a question about a fact, in any wording, and its answer."""
    if told.checked and rng.random() < 0.2:
        forms, true, value, wrong = told.checked
        yes = rng.random() < 0.5
        said = value if yes else rng.choice(wrong)
        return reworded(rng, tidy(pick(rng, forms).replace("{}", said)), 0.45), f"{'Yes' if yes else 'No'}, {true}."  # fmt: skip
    forms, answer = told.asked[0] if rng.random() < first else rng.choice(told.asked)
    return reworded(rng, pick(rng, forms), 0.3), answer


def some(rng: Random) -> list[Fact]:
    """Return one to four facts: of one frame, or of several."""
    n = rng.choices((1, 2, 3, 4), (0.4, 0.34, 0.2, 0.06))[0]
    if rng.random() < 0.28:
        return [clause(rng) for _ in range(n)]
    if rng.random() < 0.6:
        return frames.some(rng, n)
    return [frames.some(rng, 1)[0] for _ in range(n)]


def together(rng: Random, said: list[str]) -> str:
    """Join sentences, some of them to one."""
    text = said[0]
    for new in said[1:]:
        gap = rng.choice(JOIN) if text.endswith(".") else ". "
        text = f"{text.rstrip('.')}{gap}{new if gap == '. ' else lower(new)}"
    return text


def at_once(rng: Random) -> list[Pair]:
    """Told and asked in one turn, and asked again."""
    facts = some(rng)
    said = [pick(rng, f.said) for f in facts]
    text = together(rng, said)
    if rng.random() < 0.15:
        text = me.led(rng, text)
    if not text.endswith((".", "?", "!")):
        text += "."
    ask, answer = question(rng, rng.choice(facts))
    whole = f"{ask} {text}" if rng.random() < 0.06 else f"{text}{rng.choice(GAP)}{ask}"
    pairs = [(whole, answer)]
    for _ in range(rng.choice((0, 1, 2, 2, 3))):
        pairs.append(question(rng, rng.choice(facts), 0.3))
    return pairs


def later(rng: Random, between) -> list[Pair]:
    """Told in one or several turns, asked later."""
    facts = some(rng)
    said = [pick(rng, f.said) for f in facts]
    pairs = [(me.led(rng, text), me.ACKS) for text in said]
    if len(said) > 1 and rng.random() < 0.4:
        pairs = [(me.led(rng, together(rng, said)), me.ACKS)]
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        pairs += between(rng)
    for _ in range(rng.choice((1, 2, 2, 3, 3))):
        pairs.append(question(rng, rng.choice(facts), 0.4))
    if rng.random() < 0.1:
        pairs.append(untold(rng))
    return pairs


def changed(rng: Random, between) -> list[Pair]:
    """A fact, its correction, and what is right then."""
    if rng.random() < 0.4:
        return moved(rng)
    told, new, ask, answer = frames.change(rng)
    fix = one_of(rng, me.FIXES) if rng.random() < 0.75 else ""
    pairs = [(me.led(rng, told), me.ACKS)]
    if rng.random() < 0.15:
        pairs += between(rng)
    pairs.append((tidy(f"{fix} {lower(new) if fix else new}"), me.ACKS))
    pairs.append((reworded(rng, ask, 0.3), answer))
    return pairs


MOVED = (
    ("the {t} (is|lies|was) {at}.|{n} (put|left|kept) the {t} {at}.|i (put|left) the {t} {at}.|{at} (is|lies) the {t}.", "{n2} (took|moved|carried|brought|put|laid|threw|hid) the {t} (from there|away|) {at2}.|then {n2} (put|laid|hid) (it|the {t}) {at2}.|i (moved|carried|put|brought) the {t} {at2}.|(now|today|meanwhile|later) the {t} (is|lies|was put) {at2}.|the {t} is not {at} (any more|now)(, it is|. it is|, but) {at2}.|somebody (put|moved|carried|took) the {t} {at2}.|we (keep|have) the {t} {at2} now.|{n2} got the {t} and (put|laid|left) it {at2}.|(i|{n2}) picked the {t} up and (left|dropped|put) it {at2}.", "where (is|was|lies) the {t} (now|in the end|at last|today|)?|the {t} is where (now|)?|where (do|can|should|must) (i|we) (look for|find|get) the {t} (now|)?|in (which|what) place is the {t} now?|(tell me|say) where the {t} is (now|).|i need the {t}. where is it (now|)?|what place is the {t} in (now|)?", "The {t} is {at2}."),
    ("the {ts} (are|lie|were) {at}.|{n} (put|left|kept) the {ts} {at}.|i (put|left) the {ts} {at}.|{at} (are|lie) the {ts}.", "{n2} (took|moved|carried|brought|put|laid) the {ts} {at2}.|i (moved|carried|brought|picked up) the {ts} and (laid|left|dropped) them {at2}.|then {n2} (laid|hid|put) them {at2}.|(now|today|later) the {ts} (are|lie|were put) {at2}.|the {ts} are not {at} (any more|now)(, they are|. they are|, but) {at2}.|somebody (put|moved) the {ts} {at2}.", "where (are|were|lie) the {ts} (now|in the end|today|)?|the {ts} are where (now|)?|where (do|can|should|must) (i|we) (look for|get) the {ts} (now|)?|(tell me|say) where the {ts} are (now|).|i need the {ts}. where are they (now|)?", "The {ts} are {at2}."),
    ("{n} (lives|has a flat|is at home) in {town}.|{n}'s home is in {town}.", "{n} (moved|has moved|went|goes|travelled and stays) (to|away to|on to) {town2}.|{n} (does not live|no longer lives|is no longer|is not) in {town} (any more|)(, but| but|. now {n} is|, {n} lives) in {town2}.|(now|today|since may|since then|later) {n} lives in {town2}.|{n} (left|gave up|sold the flat in) {town} (for|and moved to|to live in|and now is in) {town2}.|from {town} {n} moved to {town2}.|{n} has a (new home|new flat|house) in {town2} (now|).|{n}'s new (city|home|town) is {town2}.", "where (does {n} live|is {n}|is {n}'s home) (now|today|at present|)?|in (which|what) (city|town) (does {n} live|is {n}) (now|today|)?|{n} lives where (now|)?|(which|what) (city|town) does {n} live in (now|)?|{n}'s (city|town|home) (now|is|)?|(tell me|say) where {n} lives (now|).|where would i visit {n} (now|)?", "{n} lives in {town2}."),
    ("{n} (has|owns|bought) a {c} {t}.|{n}'s {t} is {c}.|the {t} is {c}.", "{n} (painted|coloured|dyed) the {t} {c2}.|the {t} (became|turned|was painted|has been painted|got painted) {c2}.|(now|today|after that|later) the {t} is {c2}.|the {t} is not {c} (any more|)(, it is|, but| but|. it is) {c2}.|(i see|we see|they say) the {t} is {c2} (now|in fact|really|).|i said {c}, but the {t} is {c2}.|{c2} is the (right|real|new|true) colour of the {t}.", "(what|which) colour (is|has) the {t} (now|really|today|in the end|)?|the {t} is (what|which) colour (now|)?|the colour of the {t} (now|)?|(tell me|say|name) the (new|right|real) colour of the {t}.|the {t}'s colour (now|is|)?|how does the {t} look now?", "The {t} is {c2}."),
    ("the {event} (is|was|takes place) on {day}.|we have the {event} on {day}.|our {event} is on {day}.", "(they|we|i) (moved|changed|put|shifted) (it|the {event}) to {day2}.|the {event} (was moved|has been moved|was changed|was put|is moved) (from {day} |)to {day2}.|the {event} is not on {day} (any more|)(, it is|, but|. it is) on {day2}.|(now|today they say|they say|it seems|in fact|the truth is:) the {event} is on {day2}.|not {day}, but {day2}.|on {day} nobody has time, so the {event} is on {day2}.|{day2} is the new day of the {event}.", "when is the {event} (now|then|)?|(on|) (which|what) day is the {event} (now|then|)?|the {event} is when (now|)?|(which|what) is the (new|right) day of the {event}?|when (should|do|must) (i|we) (come|go) to the {event}?|the {event}: which day?|(tell me|say) when the {event} is (now|).", "The {event} is on {day2}."),
    ("{n} is a {job}.|{n} works as a {job}.", "{n} (became|is now|turned into|works now as|found a new job as) a {job2}.|(now|today|since may) {n} (is|works as) a {job2}.|{n} (is not|is no longer|no longer works as) a {job} (any more|)(, but| but|. now {n} is|, {n} is) a {job2}.|{n} left the job and is a {job2} (now|).", "(what|which) is {n}'s (job|new job|profession) (now|)?|what (does {n} do|does {n} work as|is {n}) (now|today|)?|{n} works as what (now|)?|{n}'s (job|new job) (is|now|)?|(tell me|say) (what {n} is now|{n}'s new job).", "{n} is a {job2}."),
    ("the {lock} {key} is {digits}.|the {key} of the {lock} is {digits}.", "(they|we|i|somebody) changed (it|the {key}|the {lock} {key}) to {digits2}.|(now|today|from now on) the {lock} {key} is {digits2}.|the (new|right) {key} of the {lock} is {digits2}.|not {digits}, (but|it is) {digits2}.|the {lock} {key} is {digits2}, not {digits}.|forget {digits}, the {lock} {key} is {digits2}.", "(what|which) is the (|new |right )({key} (for|of) the {lock}|{lock} {key}) (now|)?|(what|which {key}) opens the {lock} (now|)?|what do i (enter|press) at the {lock} (now|)?|the {lock} {key} (now|is|)?|how do i open the {lock} now?", "The {lock} {key} is {digits2}."),
)  # fmt: skip


def moved(rng: Random) -> list[Pair]:
    """Something changes in its own words."""
    told, new, ask, answer = rng.choice(MOVED)
    words = _words(rng, " ".join((told, new, ask, answer)))
    fix = one_of(rng, me.FIXES) if rng.random() < 0.25 else ""
    first, second = filled(rng, told, words), filled(rng, new, words)
    second = tidy(f"{fix} {lower(second)}") if fix else second
    last = filled(rng, ask, words)
    answer = tidy(filled(rng, answer, words))
    roll = rng.random()
    if roll < 0.3:
        return [(f"{first} {second} {last}", answer)]
    if roll < 0.45:
        return [(f"{first} {second}", me.ACKS), (last, answer)]
    return [(first, me.ACKS), (second, me.ACKS), (last, answer)]


def _words(rng: Random, text: str) -> dict[str, str]:
    out: dict[str, str] = {}
    for name in dict.fromkeys(SLOT.findall(text)):
        word = slot(rng, name)
        while word in out.values():
            word = slot(rng, name)
        out[name] = word
    return out


def untold(rng: Random) -> Pair:
    """A question about what was not told."""
    told = clause(rng) if rng.random() < 0.4 else frames.some(rng, 1)[0]
    forms, _ = told.asked[0]
    ask = pick(rng, forms)
    return (reworded(rng, ask, 0.3), me.NOT_TOLD) if len(ask) > 12 else untold(rng)


UNTOLD = "what did {n} (eat|drink|buy|dream|say|do|read|sing|cook) (yesterday|last week|this morning|in the end|today|on {day}|last night)?|(where|when|why|how) did {n} (go|sleep|travel|eat|learn it|find it|get it|buy it|come from)( yesterday| last week| today| this morning|)?|how (old|tall|big|rich) is {n}?|what is {n}'s (job|age|name day|hobby|favourite colour|phone number|address|last name)?|(who|what) does {n} (like|love|know|fear|want|need)?|where does {n} (live|work|sleep|study)?|who is {n}'s (brother|sister|mother|boss|friend)?|how (much|many) (did|does) {n} (pay|earn|weigh|own)?|(what|which) (shoes|song|car|book|food) does {n} (like|have|want)?|when was {n} born?|does {n} have (a brother|children|a dog)?"


def not_told(rng: Random) -> list[Pair]:
    """A fact about somebody, and a question that it does not answer."""
    told = next(f for f in iter(lambda: clause(rng) if rng.random() < 0.5 else frames.some(rng, 1)[0], None) if f.said[:1].isupper())  # fmt: skip
    said = pick(rng, told.said)
    names = [w.removesuffix("'s") for w in said.replace(",", " ").replace(".", " ").split() if w.removesuffix("'s") in NAMES]  # fmt: skip
    if names and rng.random() < 0.7:
        ask = filled(rng, UNTOLD, {"n": names[0]})
        values = {answer for _, answer in told.asked}
        if any(ask.split()[0] == q.split()[0] for f, _ in told.asked for q in f.split("|")) and rng.random() < 0.7:  # fmt: skip
            ask = filled(rng, "what did {n} (eat|drink|dream|say|sing) (yesterday|last week|this morning|today|last night)?", {"n": names[0]})  # fmt: skip
        if any(w in said for w in ("lives", "years", "likes", "loves", "works")) and values:
            ask = filled(rng, "what did {n} (drink|dream|say|sing) (yesterday|last week|today|last night)?", {"n": names[0]})  # fmt: skip
        answer = me.NOT_TOLD
    else:
        ask, answer = untold(rng)
        if any(w in said for w in ask.rstrip("?.").split()[-2:]):
            ask, answer = question(rng, told)
    if rng.random() < 0.5:
        return [(f"{said} {ask}", answer)]
    return [(said, me.ACKS), (ask, answer)]


NAMES = frozenset(v.NAMES)


def hard(rng: Random) -> list[Pair]:
    """What is learnt last: two owners and two things, yes or no, word sums, what is larger."""
    roll = rng.random()
    if roll < 0.5:
        (x, y), (s, t) = rng.sample(v.NAMES, 2), rng.sample(v.THINGS, 2)
        c, d = rng.sample(v.COLOURS, 2)
        t = s if rng.random() < 0.35 else t
        facts = [owned(rng, x, s, c, False), owned(rng, y, t, d, False)]
        if s == t:
            facts = [frames.fact(rng, frames.frames()[0], {"n": n, "t": s, "c": hue}) for n, hue in ((x, c), (y, d))]  # fmt: skip
        has = rng.choice(("has", "has", "has", "owns", "wears", "carries", "bought"))
        said = [f"{n} {has} {a(hue)} {what}." for n, what, hue in ((x, s, c), (y, t, d))]
        pairs = [(f"{together(rng, said)} {ask}", answer) for ask, answer in (question(rng, rng.choice(facts), 0.6),)]  # fmt: skip
        if rng.random() < 0.2:
            pairs = [(text, me.ACKS) for text in said] + [question(rng, rng.choice(facts), 0.6)]
        return pairs + [question(rng, rng.choice(facts), 0.5) for _ in range(rng.choice((0, 1, 2)))]
    if roll < 0.72:
        return [sums.numbers(rng)]
    if roll < 0.9:
        return [sums.story(rng)]
    return [known.whether(rng)]


def single(rng: Random) -> list[Pair]:
    """One question that needs no fact of the dialogue."""
    roll = rng.random()
    if roll < 0.05:
        return [lists.unfinished(rng)]
    if roll < 0.67:
        ask, answer = sums.ask(rng) if roll < 0.44 else known.known(rng)
        plain = ask.endswith("?") and ". " not in ask
        return [(lists.placed(rng, ask) if plain and rng.random() < 0.07 else ask, answer)]
    return [small.short(rng)]


def dialogue(rng: Random) -> list[Pair]:
    """Return turns of one topic."""
    roll = rng.random()
    if roll < 0.28:
        return at_once(rng)
    if roll < 0.42:
        return later(rng, single)
    if roll < 0.53:
        return me.talk(rng, single)
    if roll < 0.61:
        return changed(rng, single)
    if roll < 0.65:
        return not_told(rng)
    if roll < 0.69:
        return lists.notes(rng) if roll < 0.675 else lists.pets(rng)
    return single(rng)
