# ruff: noqa: E501 - phrases of one meaning a line read better than wrapped ones
"""Sums, counting, what is next and comparing, in many wordings."""

from random import Random

from chat.grammar.phrases import filled, one_of
from chat.vocabulary import COUNTABLE, DAYS, LETTERS, MONTHS, NAMES, NUMBER_WORDS

Pair = tuple[str, str]
ORDER = (
    "(please|) (find|tell me|work out|calculate|figure out|write down|do|solve|say|show me|determine|try) {} (for me|quickly|now|please|if you can|)(.|?)"
    "|(can|could|would|will) you (please|kindly|quickly|) (find|tell me|work out|calculate|figure out|do|solve|say|try) {} (for me|)?"
    "|(what is|what's|how much is|what do you get for|what comes out of|what would be|what do you make of|what will be) {} (then|exactly|again|in total|)?"
    "|(i need|i want|i have to find|help me with|let me have|i would like to know|next:|now:|quick:|question:|and|so|then|sum:|exercise:|my task is) {}(.|?|, please.)"
    "|{} (is|gives|equals|comes to|results in|is equal to|adds up to|would be|must be) (what|how much|which number|)?"
    "|{}, (what is that|how much is that|what do you get|how much is it|what is it|can you do it|do you know it)?"
    "|(do|did|would|can) you know (what|how much) {} (is|makes|comes to)?|(a child|somebody|my son|a friend) asks (me|you) (what|how much) {} is.|(what|which number) does {} (give|come to|equal|result in)?"
)  # fmt: skip


def number(rng: Random, n: int, words: float = 0.25) -> str:
    return NUMBER_WORDS[n] if n <= 20 and rng.random() < words else str(n)


def sum_of(rng: Random) -> Pair:
    """Plus, minus, times and halves as noun phrases in many sentences."""
    top = rng.choice((6, 10, 10, 20, 20, 30))
    x, y = rng.randrange(0, top + 1), rng.randrange(0, top + 1)
    words = 1.0 if rng.random() < 0.25 else 0.0
    roll = rng.random()
    if roll < 0.55:
        s, t = number(rng, x, words), number(rng, y, words)
        what = f"{s} plus {t}|{s} plus {t}|{s} + {t}|{s}+{t}|the sum of {s} and {t}|{s} added to {t}|{s} and {t} together|{s} with {t} added|{s} and another {t}|{s} increased by {t}|{s} and then {t} more|{t} more than {s}|the total if you add {s} to {t}|{s} and {t} added up"
        own = f"(what|how much|which number) do (i|you|we) get (when|if) (i|you|we) add {s} (to|and) {t}?|(add|put) {s} (and|to) {t} together, (please|what is it|and tell me the result)(.|?)|(how much|what) do {s} and {t} (give|make|come to) (together|in all|)?|{s} and {t}, added (up|together)?|{s} plus {t} (please|?|=|= what?|gives?|and the result is?)|if i add {t} to {s}, (what|which number|how much) (comes out|do i get|is it)?|start with {s}, add {t}.|take {s} and add {t}.|{s}, then {t} more: (what|how much) is (that|it)?|(to|) {s} i add {t}. what do i (get|have)?"
        answer = f"{x} plus {y} is {x + y}."
    elif roll < 0.85:
        x, y = max(x, y), min(x, y)
        s, t = number(rng, x, words), number(rng, y, words)
        what = f"{s} minus {t}|{s} minus {t}|{s} - {t}|{s}-{t}|{s} less {t}|the difference between {s} and {t}|{t} taken from {s}|{s} take away {t}|{t} subtracted from {s}|{s} reduced by {t}|{s} with {t} taken away|{s} when {t} are missing|{t} fewer than {s}"
        own = f"(what|how much|which number) (is left|remains) (when|if) (i|you|we) take {t} (away|) from {s}?|(take|subtract) {t} from {s}, (please|what is it|and tell me the result)(.|?)|if i take {t} away from {s}, (what|how much) is left?|start with {s}, take away {t}.|from {s} take {t}.|{s}, and then {t} less: what is that?|(how much|what) is {s} if {t} go?|how much is left of {s} (after i take {t}|if i remove {t})?|{s} minus {t} (please|?|=|= what?|leaves?|gives?)"
        answer = f"{x} minus {y} is {x - y}."
    elif roll < 0.95:
        x, y = rng.randrange(0, 11), rng.randrange(0, 11)
        s, t = number(rng, x, words), number(rng, y, words)
        what = f"{s} times {t}|{s} times {t}|{s} * {t}|{s} x {t}|{s}*{t}|{s} multiplied by {t}|the product of {s} and {t}"
        own = f"multiply {s} (by|with|and) {t}.|{s} times {t} (please|?|=|makes?)|{t} rows of {s}: how many is that?"
        answer = f"{x} times {y} is {x * y}."
    else:
        n = rng.randrange(1, 21)
        if rng.random() < 0.5:
            what, own, answer = f"half of {2 * n}|one half of {2 * n}|{2 * n} divided by 2|{2 * n} halved|{2 * n} / 2", f"divide {2 * n} by (two|2).|halve {2 * n}.|cut {2 * n} in half.|{2 * n} in two halves: how much is each?", f"Half of {2 * n} is {n}."  # fmt: skip
        else:
            what, own, answer = f"twice {n}|double {n}|{n} doubled|two times {n}", f"double the number {n}.|{n}, but twice as much?", f"Twice {n} is {2 * n}."  # fmt: skip
    text = one_of(rng, own) if rng.random() < 0.4 else one_of(rng, ORDER.replace("{}", f"({what})"))
    return text, answer


GETS = "gets|buys|finds|wins|receives|collects|takes|makes|bakes|borrows|adds|brings"
GOT = "got|bought|found|won|received|collected|took|made|borrowed|added|brought"
LOSES = "loses|gives away|eats|sells|drops|breaks|uses|throws away|spends|forgets|hands out"
LOST = "lost|gave away|ate|sold|dropped|broke|used|threw away|spent|forgot|handed out"
BASE_LOSES = "lose|give away|eat|sell|drop|break|use|throw away|spend"
BASE_GETS = "get|buy|find|win|receive|collect|take|make|add"


def story(rng: Random) -> Pair:
    """Somebody has some, and gets or loses some; or two heaps are put together."""
    who, to = rng.sample(NAMES, 2)
    many = rng.choice(
        (*COUNTABLE, "euros", "dollars", "pounds", "points", "toys", "cards", "balls")
    )
    top = rng.choice((6, 10, 10, 14))
    x, y = rng.randrange(1, top + 1), rng.randrange(1, top + 1)
    me = rng.random() < 0.3
    roll = rng.random()
    words = 1.0 if rng.random() < 0.3 else 0.0
    whom, has, had, do = ("i", "have", "had", "do") if me else (who, "has", "had", "does")
    told = "You have" if me else f"{who} has"
    x, y = (max(x, y), min(x, y)) if roll > 0.62 else (x, y)
    s, t = number(rng, x, words), number(rng, y, words)
    if roll < 0.4:
        gets, z = (BASE_GETS if me else GETS), x + y
        text = f"{whom} {has} {s} {many}(. | and )(then|now|later|) {whom} ({gets}) {t} (more|more {many}|other {many}|).|{whom} {had} {s} {many} and ({GOT}) {t} (more|others|).|{whom} ({GOT}) {s} {many} (in the morning|on monday|first|yesterday) and {t} (more|) (in the evening|on tuesday|later|today).|{whom} {has} {s} {many}. {to} gives {'me' if me else who} {t} (more|)."
        text += f"|first {whom} ({GOT}) {s} {many}, (later|after that|and then) {t} more."
        ask = f"how many {many} {do} {whom} have (now|altogether|in all|then|together)?|how many {many} (is that|are that|does that make|are there now)?|how many {many} {has} {whom} (now|got)?|{whom} {has} how many {many}?|(what|how many) (does|do) {whom} have now?|(count|add up) the {many} of {'mine' if me else who}.|the number of {many} now?|(so|now), how many {many}?|how many does that make?"
    elif roll < 0.62:
        z = x + y
        many2 = many if rng.random() < 0.7 else rng.choice(COUNTABLE)
        text = f"{who} has {s} {many} and {to} has {t}.|there are {s} {many} in one (box|bag|room) and {t} in another.|{s} {many} (are|lie) here, {t} (more|) (are|lie) there.|{who} (brings|has|eats) {s} {many}, {to} {t}.|on the table are {s} {many}, on the floor {t}.|if you put {s} {many} and {t} {many} together:|{s} {many} come, then {t} more come.|{s} (red|small|old) {many} and {t} (blue|big|new) {many}."
        ask = f"how many {many} (are there|do they have|is that|are that|have they) (together|altogether|in all|)?|how many {many} do we (have|count|see) (together|in all)?|together they have how many {many}?|the sum of the {many}?|all {many} together, how many?|count all {many}.|how many {many} are here?"
        del many2
        told = "Together there are"
    else:
        loses, z = (BASE_LOSES if me else LOSES), x - y
        text = f"{whom} {has} {s} {many}(. | and | but )(then|now|later|) {whom} ({loses}) {t} (of them|).|{whom} {had} {s} {many} (and|but) ({LOST}) {t} (of them|{many}|).|{t} of {'my' if me else who + chr(39) + 's'} {s} {many} (got lost|are gone|were sold|broke|fell down).|of {s} {many}, {whom} ({loses}) {t}.|{whom} {has} {s} {many}. {to} takes {t} (of them|away|)."
        text += f"|there (are|were) {s} {many}. {t} of them (go|went|fly away|flew away|fell|are gone|were sold|left)."
        ask = f"how many {many} (are left|remain|{do} {whom} have now|are still there|{do} {whom} still have|stay|are there still)?|how many (are left|remain|are still there|are there now)?|what is left?|{whom} still {has} how many {many}?|(so|now), how many {many} (are left|remain)?|the number of {many} that (is left|remains)?"
        told = told if "there" not in text[-200:-190] else told
    said, question = one_of(rng, text), one_of(rng, ask)
    if said.startswith("There") or "together" in said.lower():
        told = "There are"
    if said.endswith(":"):
        return f"{said[:-1]}, {question[0].lower()}{question[1:]}", f"{told} {z} {many}."
    return f"{said} {question}", f"{told} {z} {many}."


def counting(rng: Random) -> Pair:
    """Numbers and letters in order."""
    down, letters = rng.random() < 0.25, rng.random() < 0.12
    low = 1 if rng.random() < 0.6 else rng.randrange(2, 20)
    high = low + rng.choice((2, 3, 4, 4, 5, 6, 7, 8, 9))
    if low == 1 and rng.random() < 0.2:
        high = rng.choice((10, 12, 15, 20))
    s = number(rng, low, 0.5)
    t = number(rng, high, 0.5)
    row = ", ".join(map(str, range(low, high + 1))) + "."
    if letters:
        a, z = sorted(rng.sample(range(26), 2))
        row = ", ".join(LETTERS[a : z + 1]) + "."
        return one_of(rng, f"(say|list|write|name|recite|give me) (all|) the letters (from|between) {LETTERS[a]} (to|through|up to|until) {LETTERS[z]}.|(what|which) letters go from {LETTERS[a]} to {LETTERS[z]}?|the alphabet from {LETTERS[a]} to {LETTERS[z]}(, please|).|letters {LETTERS[a]} to {LETTERS[z]}?"), row  # fmt: skip
    if down:
        back = ", ".join(map(str, range(high, low - 1, -1))) + "."
        ends = f"(to|until|down to|till) {s}" + ("|" if low == 1 else "")
        return one_of(rng, f"(please|now|can you|could you|i want you to|) (count|go|run) (down|backwards|back|backward|in reverse) from {t} ({ends})(.|?)|(from|beginning with|starting with) {t}, count (down|backwards|back) ({ends}).|(give me|say|i want to hear|make|let me hear|start) (a|the) countdown from {t} ({ends}).|countdown from {t} ({ends})|(make|run|give me|let me hear|i need) a countdown (that begins|that starts|beginning|which begins|with the start) (at|with) {t}.|(backwards|in reverse|down), (starting|beginning) (at|with|from) {t}, count.|(say|list|name|write) the numbers from {t} (down|back) to {s}.|{high}, {high - 1}, {high - 2}: go on down to {s}.|(at|from) {t} we start, and count (down|backwards) to {s}.|the numbers from {t} down to {s}, please."), back  # fmt: skip
    own = f"(please|now|then|can you|could you|would you|i want you to|let us|try to|) (count|count up|count aloud) from {s} (to|up to|until|till) {t} (please|for me|aloud|)(.|?)|(say|list|name|write|recite|type|tell me|show me|give me|print) (all|) (the|) numbers (from|between) {s} (to|up to|until) {t}(, please|).|(from|starting from|beginning at|starting with) {s}, count (up|) to {t}.|(begin|start) (at|with|from) {s} (and|then) (count|go) (on|up|) (to|until) {t}.|numbers from {s} to {t}(?|.|, please)|(what|which) numbers go from {s} to {t}?|the numbers {s} (to|through) {t}, (please|one after another|in order).|(say|list|recite|name|read out|write) {s} through {t}(.|, please.)|{s} (to|through) {t}, (count|in order|one by one|go).|i (want|like|need|would like) to hear (you count|the numbers) from {s} to {t}.|{low}, {low + 1}: (go on|continue|carry on|count on) (up|) to {t}.|{low}, {low + 1}, {low + 2}... (go on|continue|carry on) to {t}."
    if low == 1:
        own += f"|(please|now|then|can you|could you|would you|i want you to|let us|try to|show me how you|) (count|count up|count aloud) (to|up to|until|till) {t} (please|for me|aloud|)(.|?)|how do you count to {t}?|(say|list|name|write) the first {t} numbers.|the first {t} numbers(, please|?)|(count|count up|go on counting|say numbers) (and end|and stop counting|, but stop|and finish|and halt|up and stop) (at|with|when you are at|after) {t}.|count until you (reach|are at|come to|have said) {t}.|(count|counting), but not (further|higher|more) than {t}.|(do not|don't) count (further|higher) than {t}, (start|begin|go).|{t} is where (counting|your counting|the count) (ends|stops). (go|start|begin).|begin to count, {t} is the (end|last number).|(counting|count): (to|up to) {t}."
    return one_of(rng, own), row


def following(rng: Random) -> Pair:
    """What is next, what was before: numbers, letters, days, months, seasons."""
    kind, items = rng.choice((("number", [str(n) for n in range(1, 60)]), ("letter", list(LETTERS)), ("day", DAYS + DAYS), ("month", MONTHS + MONTHS)))  # fmt: skip
    at = rng.randrange(3, len(items) - 3)
    x, y = items[at], items[at + 1]
    row = ", ".join(items[at - rng.choice((1, 2, 3)) : at + 1])
    w = f"(what|which {kind}|what {kind})"
    if rng.random() < 0.68:
        text = f"{row}, (what|{w}) (is|comes|follows) (next|then|now)?|{row}: {w} (is|comes) next?|{row} ... (what is next|go on|next|continue)?|{row}. (what|{w}) (comes|is|goes) (next|after that)?|{w} (comes|is|follows|stands) (next|right|directly|just|) after {x}?|(after|following) {x} (comes|is|follows|we have) {w}?|{x} is (followed by|before) {w}?|(name|say|tell me|give me|write) the {kind} (right|that comes|that is|which follows|directly|) after {x}.|the (next|following) {kind} after {x} (is|?)|the {kind} after {x}(?| please| is?)|next after {x}?|{x}, and (next|after that)?|(what|which) {kind} has {x} right before it?|{row}, ...?"
        if kind == "day":
            text += f"|if (it is|today is|we have) {x} (now|today|), (what|which) day (comes|is|follows) (tomorrow|next)?|(it is|today is|we have) {x}(.|, so) (what|which) day (is|will be|comes) tomorrow?|tomorrow is (what|which day) if today is {x}?|yesterday was {x}. (what|which) day is (it|) today?|the day after {x}?"
        if kind == "number":
            text += f"|(add one to|one more than|count one on from) {x}?|(what|which) number is one (more than|after|above) {x}?|i (count|counted|say) {row}. (what|which number) (comes|is) next?"
        return one_of(rng, text), f"{y} comes after {x}."
    text = f"{w} (comes|is|stands|do we have) (right|directly|just|) before {y}?|before {y} (comes|is|we have) {w}?|(name|say|tell me|give me|write) the {kind} (right|that comes|that is|directly|) before {y}.|the {kind} before {y}(?| please| is?)|{y} (comes|is|follows) after {w}?|the last {kind} before {y}?"
    if kind == "day":
        text += f"|(it is|today is) {y}(.|, so) (what|which) day was (it|) yesterday?|if tomorrow is {y}, what is today?|yesterday was (what|which day) if today is {y}?"
    if kind == "number":
        text += f"|one less than {y}?|(what|which) number is one (less than|before|below) {y}?"
    return one_of(rng, text), f"{x} comes before {y}."


MORE = (("taller", "tall", "shorter", "tallest"), ("older", "old", "younger", "oldest"), ("bigger", "big", "smaller", "biggest"), ("faster", "fast", "slower", "fastest"), ("stronger", "strong", "weaker", "strongest"), ("richer", "rich", "poorer", "richest"), ("heavier", "heavy", "lighter", "heaviest"), ("happier", "happy", "sadder", "happiest"))  # fmt: skip


def people(rng: Random) -> Pair:
    """Who is taller, who is not as tall, who won, who has it now."""
    x, y, z = rng.sample(NAMES, 3)
    more, plain, less, most = rng.choice(MORE)
    roll = rng.random()
    both = f"(of {x} and {y},|of the two,|of {y} and {x},|between {x} and {y},|)"
    if roll < 0.5:
        said = filled(rng, f"{x} is {more} than {y}.|{y} is {less} than {x}.|{y} is not as {plain} as {x}.|{y} is less {plain} than {x}.|{both} {x} is {more}.|compared (with|to) {y}, {x} is {more}.|{x} is {more}, {y} is {less}.|{x} is {plain}, but {y} is not.|{y} is {plain}, but {x} is {more}.|{x} is a lot {more} than {y}.|{x} is the {most} of (the two|them), {y} is {less}.|nobody here is {more} than {x}, not (even|) {y}.")  # fmt: skip
        if rng.random() < 0.5:
            ask, right = f"{both} who is {more}?|who is the {more} (one|person|of them|of the two)?|(which|what) (one|person|of them) is {more}?|who is {more}, ({x} or {y}|{y} or {x})?|(name|tell me|say) the {more} (one|of the two|person).|the {more} one is (who|called)?|{more} is who?", f"{x} is {more}."  # fmt: skip
        else:
            ask, right = f"{both} who is {less}?|who is the {less} (one|person|of them|of the two)?|(which|what) (one|person|of them) is {less}?|who is {less}, ({x} or {y}|{y} or {x})?|who is less {plain}?|(name|tell me|say) the {less} (one|of the two|person).|the {less} one is (who|called)?|{less} is who?|who of them is the less {plain} one?", f"{y} is {less}."  # fmt: skip
        return f"{said} {one_of(rng, ask)}", right
    if roll < 0.75:
        thing = filled(rng, "{t}").lower()
        said = one_of(rng, f"{x} (gave|handed|passed|sold|brought|lent|sent|threw|showed and gave|offered) the {thing} to {y}.|{x} (gave|handed|passed|sold|brought|lent|sent) {y} the {thing}.|{y} (got|took|received|borrowed|bought|has) the {thing} from {x}.|the {thing} (went|was given|was handed|was sold|came|passed) (from {x} to {y}|to {y} by {x}).|{x} had (a|the) {thing}(. | but |, and )(now|today|later|then) {y} (has|took|got) it.|from {x} the {thing} went to {y}.|{x} gave away the {thing}, {y} got it.")  # fmt: skip
        return f"{said} {one_of(rng, f'(who|which person) (has|owns|holds|keeps|got) the {thing} (now|then|in the end|today|at the end)?|(with|at) (whom|which person) is the {thing} (now|)?|the {thing} is with (whom|who) (now|)?|the {thing} now belongs to (whom|who)?|who is the owner of the {thing} now?|where is the {thing} now, with {x} or (with|) {y}?|whose is the {thing} now?|who did the {thing} (go|come) to?|to whom did {x} give the {thing}?')}", f"{y} has the {thing}."  # fmt: skip
    game = filled(rng, "(chess|tennis|cards|golf|football|swimming|running|the game|the match|the quiz|the contest)").lower()  # fmt: skip
    said = one_of(rng, f"{x} (won|wins) against {y} (at|in) {game}.|{x} (beat|defeated) {y} (at|in) {game}.|{y} (lost|loses) to {x} (at|in) {game}.|at {game}, {x} is better than {y}.|{x} came (first|in first) and {y} (came|) second.|{x} is in front of {y}.|{y} cannot (beat|win against) {x} (at|in) {game}.|{x} (always|often|mostly) wins {game} with {y}.|{x} was (faster|quicker|better) than {y}.")  # fmt: skip
    if rng.random() < 0.65:
        return f"{said} {one_of(rng, '(who|which of them|which one) (won|is the winner|is better|is first|came first|was better|is ahead)?|who is the better one?|the winner is (who|called)?|name the winner.|who was it that won?')}", f"{x} is better."  # fmt: skip
    return f"{said} {one_of(rng, '(who|which of them|which one) (lost|is the loser|is not so good|came second|was second|is behind)?|name the loser.|the loser is (who|called)?')}", f"{y} is second."  # fmt: skip


def numbers(rng: Random) -> Pair:
    """Which of two or three numbers is larger; is it; odd and even; is a sum right."""
    x, y = rng.sample(range(0, rng.choice((10, 21, 21, 100))), 2)
    words = 1.0 if max(x, y) <= 20 and rng.random() < 0.25 else 0.0
    s, t = number(rng, x, words), number(rng, y, words)
    big, small = max(x, y), min(x, y)
    roll = rng.random()
    if roll < 0.4:
        up = rng.random() < 0.55
        adj, sup = rng.choice((("bigger", "biggest"), ("larger", "largest"), ("greater", "greatest"), ("higher", "highest")) if up else (("smaller", "smallest"), ("lower", "lowest")))  # fmt: skip
        text = f"(which|what|which one|which number|what number) is {adj}(,|:) {s} or {t}?|{s} or {t}, (which|which one|what|which number) is {adj}?|of {s} and {t}, (which|which one|what) is {adj}?|(choose|take|find|tell me|say|give me|show me) the {adj} (number|one|) of {s} and {t}.|(choose|tell me|say|which is) the {adj} (number|one)(:|,) {s} or {t}(?|.)|(here are|look at|we have|i have) (two|the) numbers(:|,) {s} and {t}. (which|which one|what) is (the {adj} one|{adj})?|{s}, {t}: which is {adj}?|is {s} {adj} or {t}?|is {s} or {t} the {adj} (number|one)?|compare {s} (and|with) {t}: which is {adj}?|the {adj} of {s} and {t}(, please|?| is)|{adj}: {s} or {t}?|(between|among) {s} and {t}, (which|what) is {adj}?"
        if rng.random() < 0.15:
            z = rng.randrange(0, 30)
            best = (max if up else min)(x, y, z)
            text = f"(which|what) is (the|) {sup}(,|:|) {x}, {y} or {z}?|(name|choose|find|tell me) the {sup} (number|) of {x}, {y} and {z}.|of {x}, {y} and {z}, which is the {sup}?"
            return one_of(rng, text), f"{best} is the {sup}."
        return one_of(rng, text), f"{big if up else small} is {adj} than {small if up else big}."
    if roll < 0.7:
        up = rng.random() < 0.6
        adj = rng.choice(
            ("bigger", "larger", "greater", "more", "higher")
            if up
            else ("smaller", "less", "lower", "fewer")
        )
        right = (x > y) == up
        text = f"is {s} {adj} than {t}?|is {s} {adj} than {t}?|is {s} {adj} than {t}?|{s} is {adj} than {t}, (right|yes or no|correct|is that true|true or not)?|is it (true|correct) that {s} is {adj} than {t}?|(yes or no|tell me|say)(:|,) is {s} {adj} than {t}?|is the number {s} {adj} than (the number|) {t}?|(do you think|would you say|am i right|i think) (that|) {s} is {adj} than {t}?|is {s} {adj}, compared with {t}?|does {s} come (after|before) {t}?|{s} {adj} than {t}?"
        said = one_of(rng, text)
        if "come after" in said:
            return said, f"Yes, {x} comes after {y}." if x > y else f"No, {x} comes before {y}."
        if "come before" in said:
            return said, f"Yes, {x} comes before {y}." if x < y else f"No, {x} comes after {y}."
        return said, f"Yes, {x} is {adj} than {y}." if right else f"No, {x} is not {adj} than {y}."
    if roll < 0.85:
        n, word = rng.randrange(0, 31), rng.choice(("even", "odd"))
        right = (n % 2 == 1) == (word == "odd")
        text = f"is {n} (an|a|) {word} (number|one|)?|is {n} {word}?|(is the number|would you call|tell me if|is it true that) {n} {'{}'}{word}?".replace("would you call|", "").replace("tell me if|", "").replace("is it true that", "is the number").replace("{}", "")  # fmt: skip
        return one_of(rng, text).replace("an odd", "an odd").replace("a even", "an even"), f"Yes, {n} is {word}." if right else f"No, {n} is {'even' if word == 'odd' else 'odd'}."  # fmt: skip
    x, y = rng.randrange(1, 11), rng.randrange(1, 11)
    z = x + y + (0 if rng.random() < 0.5 else rng.choice((-2, -1, 1, 2)))
    s, t, u = (number(rng, n, words) if n >= 0 else str(n) for n in (x, y, z))
    text = f"(is|does) {s} (plus|and|+) {t} (equal|equal to|) {u}?|is it (true|correct) that {s} (plus|+|and) {t} (is|equals|makes) {u}?|{s} (plus|+) {t} (is|=|equals) {u}, (right|yes or no|is that so|correct|true)?|(yes or no|check this|am i right)(:|,) {s} (plus|+) {t} (is|=) {u}?|i say {s} plus {t} is {u}. (is that right|am i right|right or wrong|correct)?|do {s} and {t} (give|add up to|equal) {u}?|is {u} the (sum|result) of {s} (and|plus) {t}?|is {u} what you get for {s} plus {t}?|can {s} plus {t} be {u}?"
    return one_of(rng, text), f"Yes, {x} plus {y} is {z}." if z == x + y else f"No, {x} plus {y} is {x + y}."  # fmt: skip


MAKERS = ((sum_of, 8), (story, 5), (counting, 5), (following, 5), (people, 5), (numbers, 5))


def ask(rng: Random) -> Pair:
    """Return a question with one right answer."""
    makers, shares = zip(*MAKERS, strict=True)
    return rng.choices(makers, shares)[0](rng)
