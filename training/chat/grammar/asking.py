# ruff: noqa: E501 - phrases of one meaning a line read better than wrapped ones
"""One question in many forms: as an order, inside another clause, with the question word last, with its topic first."""

import re
from random import Random

from chat.grammar.phrases import one_of, tidy
from chat.grammar.verbs import PAST, third

NP = r"(?:the|my|your|our|his|her|a|an|this) (?:[\w-]+ (?:(?:of|for) (?:the |my )?)?)?(?!(?:an?|the) )[\w'-]+|[A-Z][a-z]+(?:'s [\w-]+)?|I|you|we|they|it|\d+"
WH = r"where|when|who|whom|what|why|how|how (?:old|big|long|far|tall)|how (?:many|much)(?: [\w-]+)?|(?:which|what|whose) [\w-]+|(?:at|in|on|from|to|for|with) (?:what|which|whom) ?(?:[\w-]+)?|at what time"
BE = "is|are|was|were"
BE_WH = re.compile(rf"^({WH}) ({BE}) (.+)$", re.I)
CAN_WH = re.compile(rf"^({WH}) (can|will|should|could|would) ({NP})( .+)$", re.I)
STARTS = re.compile(rf"^(?:{NP})")
TAIL = re.compile(
    rf"^({NP})( (?:[a-z]+ing|called|named|made|painted|kept|now|born|sold|worth)\b.*)$"
)
DO_NP = re.compile(rf"^({WH}) (does|do|did) ({NP}|[a-z]+s) ([a-z]+)((?: .*)?)$", re.I)
BE_YES = re.compile(rf"^({BE}|can|will|should|could|has|have) ({NP}) (.+)$", re.I)
DO_YES = re.compile(rf"^(does|do|did) ({NP}|[a-z]+s) ([a-z]+)((?: .*)?)$", re.I)

INSIDE = (
    "(please|) (tell|remind|inform) me {}(, please|)."
    "|(can|could|would|will) you (please|) (tell me|say|write|state|work out|find out|remind me) {}?"
    "|do you (still|) (know|remember|recall|see|understand) {}?"
    "|i (would like|want|need|have|wish) to (know|hear|learn|find out|be told) {}."
    "|i('ve| have|) (forgotten|forgot) {}(. can you help|. help me|)."
    "|i (wonder|wondered|ask|do not remember|cannot remember|can't recall|am not sure) {}."
    "|(let me know|say|write|guess|show me|find|state) {}(, please|)."
    "|(any idea|would you know|you know|have you noted|are you able to say|is it known) {}?"
    "|(my|the|one|another) question (is|would be|was) {}."
    "|(what|all) i (want|need) to know is {}."
    "|(may|might|can|could) i (ask|know|hear) {}?"
    "|would you mind (telling me|saying) {}?"
    "|(do|can) you (think you|) (know|say|tell) {}?"
    "|from what (i said|i told you|you know|you read), {}?"
    "|(it is|was it) (about|a question of) {}."
    "|you (should|must|may) know {}."
    "|(i'd be glad|it would help me) to know {}."
    "|(help me remember|give me an answer:|answer me this:) {}?"
)  # fmt: skip
LAST = (
    "{}?|{}?|(so|and|now|well|then|okay so|right,|hmm,|in short,|again,) {}?|{}, (please|then|do you know|can you say|if you know|now|again)?"
    "|(tell me|just to check|let me ask|i ask you|say|one question|question|help me)(,|:) {}?|(i think|you said|as you know,) {}?"
)
BEFORE = "so|so,|and|now|now,|well,|okay,|right,|then|hey,|hmm,|also,|next:|again:|tell me,|tell me:|say,|question:|please,|quick:|my question:|answer this:|one thing:|from the text:|just say:|listen:|let me ask:|help:|oh,|dear,|come on,|hi,|i ask:|if you know,|in your view,|remember,"
AFTER = "now|again|then|please|, please|, then|exactly|do you know|, do you know|would you say|do you think|, if you know|, if i may ask|at the moment|, tell me|, my friend|, again|right now|, by the way|after all|in the end|, in one word"
TRUE = (
    "(is|was) it (true|correct|so|the case|a fact|known|clear) that {}?|{}, (right|correct|yes or no|is that so|isn't it|is that true|true or not|am i right|no|or not|is it|don't you think)?"
    "|(am i|would i be) (right|correct) (that|if i say that|to think that|in saying) {}?|(do|would) you (think|agree|believe|say) (that|) {}?|(can|may|should) (i|one|you) (assume|think|believe) that {}?"
    "|{}: (yes or no|true or not|is that right|is it so|correct)?|(tell me|say|let me know|please say|i want to know|i wonder|can you tell me) (if|whether) {}.|so {}?|{}?|(i think|i believe|i guess|somebody says|people say|they say) {}. (is that|am i|are they) right?"
    "|(answer|say) (yes or no|with yes or no): {}?|(yes or no|right or wrong)(:|,) {}?|does it (hold|follow|fit) that {}?|could it be that {}?|is {}?"
).replace("|is {}?", "")  # fmt: skip


def lower(text: str) -> str:
    """Return a text that can stand inside a sentence: a small first letter, but for names and I."""
    first = text.split(" ", 1)[0]
    plain = first.lower() in SMALL or first.lower().rstrip("s") in SMALL
    return text[0].lower() + text[1:] if plain else text


SMALL = frozenset(
    ["what", "where", "when", "who", "whom", "whose", "which", "why", "how", "is", "are", "was", "were", "do", "does", "did", "can", "will", "should", "could", "would", "has", "have", "the", "a", "an", "my", "your", "our", "his", "her", "this", "that", "there", "in", "on", "at", "from", "to", "for", "by", "with", "under", "behind", "near", "next", "name", "tell", "say", "give", "please", "we", "you", "it", "they"]
)  # fmt: skip


def parts(question: str) -> tuple[str, str] | None:
    """Return a wh-question as a clause inside another, and with the question word last ("" if that does not work)."""
    text = question.rstrip("?")
    if m := DO_NP.match(text):
        wh, do, who, verb, rest = m.groups()
        if do.lower() == "did" and verb not in PAST:
            return None
        form = {"does": third(verb), "do": verb, "did": PAST.get(verb, "")}[do.lower()]
        if wh.lower().startswith(("why", "how")) and not wh.lower().startswith(
            ("how many", "how much")
        ):
            return f"{wh.lower()} {who} {form}{rest}", ""
        return f"{wh.lower()} {who} {form}{rest}", f"{who} {form}{rest} {wh.lower()}"
    if (m := BE_WH.match(text)) and STARTS.match(m.group(3)):
        wh, be, who = m.groups()
        rest = ""
        if n := TAIL.match(who):
            who, rest = n.groups()
        if wh.lower() == "why":
            return None
        last = f"{who} {be}{rest} {wh.lower()}"
        return f"{wh.lower()} {who} {be}{rest}", "" if wh.lower() in (
            "what animal",
            "which animal",
            "which colour",
        ) else last
    if m := CAN_WH.match(text):
        wh, be, who, rest = m.groups()
        return f"{wh.lower()} {who} {be}{rest}", f"{who} {be}{rest} {wh.lower()}"
    if re.match(r"^(who|what|which|whose|how many)\b", text, re.I):
        return lower(text), ""
    return None


def checked(question: str) -> str | None:
    """Return a question that is answered with yes or no as a statement."""
    text = question.rstrip("?")
    if m := DO_YES.match(text):
        do, who, verb, rest = m.groups()
        if do.lower() == "did" and verb not in PAST:
            return None
        return f"{who} { ({'does': third(verb), 'do': verb, 'did': PAST.get(verb, '')}[do.lower()]) }{rest}"
    if m := BE_YES.match(text):
        be, who, rest = m.groups()
        return f"{who} {be.lower()} {rest}"
    return None


def topic(rng: Random, question: str) -> str | None:
    """Return a question with what it is about in front: "The kite, what colour is it?" """
    m = re.match(rf"^({WH}) ({BE}) ((?:the|my) [\w-]+)$", question.rstrip("?"), re.I)
    if not m:
        return None
    wh, be, who = m.group(1).lower(), m.group(2), m.group(3)
    it = "they" if be in ("are", "were") else "it"
    return one_of(
        rng,
        f"{who}(, |: | - ){wh} {be} {it}?|(about|as for|concerning|speaking of|with) {who}(, |: ){wh} {be} {it}?|{who}: {wh}?|{wh} {be} {it}, {who}?|{who} {be}( now|) (- |... |: ){wh}?|think of {who}: {wh} {be} {it}?|{who} again: {wh} {be} {it}?",
    )


def reworded(rng: Random, question: str, share: float = 0.5) -> str:
    """Return a question in another form, with the same meaning; mostly as it is where `share` is small."""
    if rng.random() > share or not question.endswith("?") or ". " in question:
        return question
    roll = rng.random()
    if (true := checked(question)) is not None:
        if roll < 0.75:
            return fit(one_of(rng, TRUE), true)
    elif roll < 0.12 and (text := topic(rng, question)):
        return tidy(text)
    elif roll < 0.75 and (two := parts(question)):
        inside, last = two
        if last and rng.random() < 0.4:
            return fit(one_of(rng, LAST), last)
        return fit(one_of(rng, INSIDE), inside)
    return around(rng, question)


def around(rng: Random, question: str) -> str:
    """Return a question with words before or after it."""
    text = question
    if rng.random() < 0.6:
        before = one_of(rng, BEFORE)
        text = f"{before} {lower(text)}"
    if rng.random() < 0.5:
        end = text[-1]
        after = one_of(rng, AFTER)
        text = f"{text[:-1]} {after[0].lower() + after[1:]}{end}"
    return tidy(text)


def fit(form: str, text: str) -> str:
    """Put a clause into a form."""
    text = tidy(form.replace("{}", lower(text) if not form.startswith("{}") else text))
    return re.sub(r"\bi\b", "I", text)
