# ruff: noqa: E501 - phrases of one meaning a line read better than wrapped ones
"""What users tell about themselves, what they correct, what they did not tell."""

import re
from random import Random

from chat.grammar.phrases import fill, one_of, slot, tidy

Pair = tuple[str, str]
ACKS = "OK, I will remember that."
NOT_TOLD = "I do not know that. You have not told me."
# told ## asked => answer
MINE = """
(|hi, |hello, |hey, |good morning, |yo, |ok, )(my name is|my name's|my name is|i am|i'm|the name is|my friends call me|people call me|you are talking to|call me|this is|it is me,|i am called|they call me|here is|everybody calls me|please call me|you may call me|my first name is|my parents named me) {n}( by the way|, nice to meet you|, and you|).|{n} is (my name|what they call me|the name my parents gave me|how people call me|who i am).|i go by {n}.|{n} here.|(you speak|you are chatting) with {n}. ## (what|what's|whats) (is|was|) my (name|first name) (again|now|please|)?|who am i (again|)?|(do you|can you) (still|) (know|remember|recall|tell me|say) (my name|who i am|what i am called|how i am called)?|(say|tell me|repeat|write|remember|give me) my name(.| please)|my name( is|) (again|)?|(how|what) (am i|do people|do they|do my friends) (called|call me)?|what should you call me?|by (what|which) name (do you know me|do i go)?|(i am|my name is) (who|what)?|(what|which) name do i (have|go by)?|(what|which) name did i (mention|tell you|say)?|(what|how) did i (say|tell you) (my name is|i am called)?|do i have a name?|whom are you talking to? => Your name is {n}.
i (live|work|stay|am at home|rent a flat|have a flat|have a house|grew up and live|feel at home|settled) in {town}( now| with my family| for some years|).|my (home|house|flat|city|home town|town) is (in |){town}.|{town} is (where i live|my home|my city|my home town|the city i live in|the place where i live).|in {town} i (live|have a house|am at home).|the (city|town) (where|in which) i live is {town}.|i moved to {town}( last year| in may|).|home for me is {town}.|i am (based|at home|living) in {town}. ## where do i live (now|)?|(what|which) (city|town|place) (do i live in|am i in|is my home|is my home town|do i come home to)?|in (what|which) (city|town) (do i live|am i at home|is my home|is my house)?|where (is my (home|house|flat)|am i at home|am i living)?|i live (where|in (what|which) (city|town))?|my (city|home town|town|home) (is|)?|(name|tell me|say|remember) my (city|home town|town).|(do you know|tell me|say|remember) where i live(.|?)|to (what|which) city do i (go|come) home?|(what|which) (city|town) did i (mention|tell you about)?|where would (one|you|a letter) (find|reach) me? => You live in {town}.
i (am|work as|am working as|became|have been|was hired as|earn my money as) a {job}( in town| for years| now|).|my (job|work|profession|trade|occupation) is {job}.|(in my job|for a living|at work) i am a {job}.|as a {job} i (work a lot|get up early|earn little|meet many people|am always busy).|i (get up early|am often tired|work a lot|like my work), (because|since|as) i am a {job}.|a {job}, that is (what i am|my job).|i learned to be a {job}. ## (what|which) (is|was) my (job|profession|work|occupation)?|what (do i do|do i work as|am i|am i by profession|do i do for a living|do i do all day|do i earn my money with)?|(what|which) (job|profession|work) (do i have|have i|is mine|did i choose)?|my (job|profession|work|occupation) (is|)?|i (work as|am) (what|a what)?|(name|tell me|say|remember) my (job|profession|work|occupation).|how do i (earn money|earn my living|make money)?|as what do i work?|what kind of work do i do? => You are a {job}.
i (have|own|keep|got|feed|walk|love) a {pet} (called|named|with the name|whose name is|that is called|by the name of) {pname}.|my {pet} (is called|is named|has the name|answers to|goes by|got the name|was named) {pname}.|the name of my {pet} is {pname}.|my {pet}'s name is {pname}.|i (called|named) my {pet} {pname}.|{pname} is (my {pet}|the name of my {pet}|a {pet} of mine|how my {pet} is called).|i have a {pet}(. its name is| - it is called|, its name is|: it is called|. i call it|. we call it) {pname}.|(at home|here) i have {pname}, a {pet}.|my wife and i (got|bought|found) a {pet} and (called|named) it {pname}. ## (what|how) is my {pet} called?|(what|what's|whats) (is|was|) the name of my {pet}?|(what|which) name (does my {pet} have|has my {pet}|did i give my {pet}|did i give to my {pet}|is my {pet}'s)?|my {pet}'s name (is|)?|my {pet} is called (what|)?|what (did|do) i call my {pet}?|(say|tell me|name|remember) (my {pet}'s name|the name of my {pet}|how my {pet} is called).|i named my {pet} what?|who is my {pet}?|how did i (call|name) my {pet}?|what does my {pet} go by? => Your {pet} is called {pname}.
my (favourite|best-loved|preferred) colour is {c}.|i (like|love|prefer) {c} (best|most of all|more than other colours|the most).|{c} is (my favourite colour|the colour i like best|the colour i love|my colour).|of all colours i (like|love|prefer) {c}.|i paint everything {c}, i love that colour.|the best colour is {c}, i think. ## (what|what's|which) (is|) my favourite colour?|(what|which) colour (do i like|do i love|is my favourite|do i like best|do i like most|is my best)?|my favourite colour (is|)?|(name|say|tell me|remember) my favourite colour.|(what|which) is the colour i (like|love)( best|)?|i like (what|which) colour (best|)?|in (what|which) colour should you paint my room? => Your favourite colour is {c}.
i (like|love|enjoy|eat a lot of|always eat|want|am fond of|am crazy about|dream of|cannot live without) {food}( every day| very much| most of all|).|my favourite (food|dish|meal) is {food}.|{food} (is|are) (my favourite food|what i like|what i eat every day|the food i love|the best food for me).|for (lunch|dinner|breakfast) i (eat|have|want|like) {food}.|give me {food} and i am happy.|i am hungry for {food}. ## what (do i like|do i love|do i enjoy|do i like to eat|do i eat|do i like most|am i fond of)?|(what|which) (food|meal) (do i like|do i love|do i like best|is my favourite|do i enjoy)?|(what|which) is my favourite (food|meal|dish)?|my favourite (food|dish|meal) (is|)?|(name|say|tell me|remember) (what i like to eat|the food i like|my favourite food).|what (would|should|could|can) you cook for me?|i like (what|which food)?|what makes a good (meal|lunch|dinner) for me? => You like {food}.
i (like|love|enjoy|do|am good at|spend my time with|am fond of) {hobby}( on sundays| very much| a lot| in my free time|).|my (hobby|sport|pastime|passion) is {hobby}.|{hobby} is (my hobby|what i do in my free time|my passion|what i like). ## (what|which) is my (hobby|pastime|passion)?|my (hobby|pastime) (is|)?|what (do i do in my free time|do i do for fun|do i like to do|do i like|am i good at|do i enjoy)?|(name|say|tell me|remember) my hobby.|(what|which) hobby do i have?|how do i spend my free time? => You like {hobby}.
i (am|'m|just turned|became|have turned|am only|am already|will soon be older, but i am) {num}( years old| years of age|)( now| today| this year|).|my age is {num}.|{num} is (my age|how old i am).|{num} years (ago i was born|old, that is me).|i was born {num} years ago.|at {num} i (still feel young|am happy|like to travel).|my cake had {num} candles, one for every year. ## (how old|what age) am i (now|)?|(what|what's) (is|) my age?|my age (is|)?|i am how old?|(say|tell me|remember|guess) (how old i am|my age).|how many years (old am i|have i lived|do i have)?|of what age am i?|do you (know|remember) (my age|how old i am)?|which age did i tell you? => You are {num} years old.
my {kin} (is called|is named|is|has the name|goes by) {n}.|my {kin}'s name is {n}.|the name of my {kin} is {n}.|{n} is (my {kin}|the name of my {kin}|a {kin} of mine|how my {kin} is called).|i have a {kin} (called|named|with the name|by the name of|whose name is) {n}.|i have a {kin}(: {n}|, {n}|. the name is {n}).|i (called|met|visited|live with|wrote to) my {kin} {n}( today|). ## (what|how) is my {kin} called?|(what|what's) (is|) (the name of my {kin}|my {kin}'s name)?|who is my {kin}?|my {kin}'s name (is|)?|my {kin} is (called|named|who)?|(say|tell me|name|remember) (my {kin}'s name|the name of my {kin}|who my {kin} is).|(what|which) name has my {kin}?|who is {n}?|who is {n} to me?|{n} is who? => Your {kin} is {n}.
my birthday (is|comes|falls|will be) in {month}.|i (was born|came into the world|have my birthday|celebrate my birthday|get older) in {month}.|{month} is (the month of my birthday|when i have my birthday|my birthday month|when i was born).|in {month} i (have my birthday|was born|turn a year older|celebrate my birthday). ## when (is my birthday|was i born|do i have my birthday|do i celebrate|do i get older)?|in (what|which) month (is my birthday|was i born|do i have my birthday|do i celebrate)?|(what|which) month (is my birthday in|is my birthday|was i born in)?|my birthday (is|is when|)?|the month of my birthday?|(say|tell me|name|remember) (the month of my birthday|when my birthday is).|(when|in which month) should you wish me a happy birthday? => Your birthday is in {month}.
i (have|own|bought|drive|got|use|lost|found|like) a {c} {t}.|my {t} is {c}.|the {t} i (have|bought|use|like) is {c}.|i (painted|coloured) my {t} {c}. ## (what|which) colour (is|was) my {t}?|my {t} is (what|which) colour?|(what|which) is the colour of my {t}?|my {t}'s colour (is|)?|(say|name|tell me|remember) the colour of my {t}.|of (what|which) colour is my {t}?|how does my {t} look? => Your {t} is {c}.
i (put|left|hid|keep|placed|dropped|forgot) my {t} {at}( this morning| yesterday|).|my {t} (is|lies|must be|is kept|was left) {at}.|{at} (is|lies) my {t}.|i always keep my {t} {at}. ## where (is|was) my {t}?|where did i (put|leave|hide|place) my {t}?|where (do|can|should) i (keep|find|look for|search for) my {t}?|my {t} is where?|(say|tell me|remember) where my {t} is.|i lost my {t}. where is it?|i need my {t}. where (should i look|do i find it)? => Your {t} is {at}.
i (want|wish|plan|hope|am going|have) to (travel|go|fly|move|drive) to {town}( in may| next year| on monday| soon|).|my next (trip|journey|holiday) (goes|is) to {town}.|{town} is where i (go|travel|fly) next.|on my holiday i (go|fly|travel) to {town}.|i (booked|have) a (flight|ticket|trip) to {town}. ## where (do i|will i|am i going to|do i want to|am i going to) (go|travel|fly)?|to (what|which) (city|town|place) (do i|will i) (go|travel|fly)?|(what|which) (city|town|place) do i want to (see|go to|travel to)?|my trip goes where?|(tell me|say|remember) where i want to go. => You go to {town}.
i (have|own|collect|bought|got|need|keep|count) {few} {many}( at home| in a box| in all|).|at home i have {few} {many}.|{few} {many} (are mine|belong to me|are in my bag). ## how many {many} (do i have|have i|have i got|are mine|do i own|belong to me)?|i have how many {many}?|the number of my {many}?|(say|tell me|remember) how many {many} i have. => You have {few} {many}.
i (play|learn|study|practise|can play) (the |){word2}( every day| at school| a little|). ## what do i (play|learn|study)?|what is it (that|) i (play|learn)?|(name|tell me) what i (play|learn|study). => You like {word2}.
on {day} i (have|go to|prepare for|am at|wait for) (a|the|my) {event}.|my {event} is on {day}.|i have (a|the|my) {event} on {day}.|{day} is (the day of my {event}|when i have my {event}). ## when (is|do i have) (the|my) {event}?|(on|) (what|which) day (is|do i have) (the|my) {event}?|my {event} is when?|(say|tell me|remember) (when my {event} is|the day of my {event}).|(the|my) {event} is on (what|which) day? => Your {event} is on {day}.
"""
INSTRUMENTS = [
    "piano",
    "guitar",
    "violin",
    "flute",
    "drums",
    "trumpet",
    "chess",
    "tennis",
    "football",
    "hockey",
    "cello",
    "accordion",
]


def facts() -> list[tuple[str, str, str]]:
    """Return (told, asked, answer)."""
    out = []
    for line in MINE.strip().splitlines():
        told, _, rest = line.partition(" ## ")
        asked, _, answer = rest.rpartition(" => ")
        out.append((told, asked, answer))
    return out


FACTS = facts()
LEAD = "(||||||(please |)(remember|note|keep|save|store|mark)( this|): |(bear in mind|note|remember|do not forget|mark my words,|know|you should know|let me say|let me mention|i tell you|i can tell you|it is important) that |(by the way|fyi|also|oh|and|so|well|listen|look|you know|just so you know|for your notes|important|fact|news|info|one thing), |a (fact|note): )"
FIXES = "(no|sorry|wait|oh|actually|hold on|oops|correction|my mistake|i was wrong|that was wrong|not quite|wrong|i meant|i must correct that|change of plan|update|scratch that|that has changed|not any more|it turns out|i was mistaken)(, |: |. )"


def fact(rng: Random, but: str = "") -> tuple[str, list[str], str, tuple]:
    """Return how a fact about the user is told, three ways to ask, the answer, and (told, asked, answer) with slots."""
    row = rng.choice([row for row in FACTS if row[2] != but])
    words = _words(rng, row)
    return (*_said(rng, row, words), row)


def _words(rng: Random, row: tuple) -> dict[str, str]:
    names = re.findall(r"\{(\w+)\}", " ".join(row))
    return {n: rng.choice(INSTRUMENTS) if n == "word2" else slot(rng, n) for n in dict.fromkeys(names)}  # fmt: skip


def _said(rng: Random, row: tuple, words: dict[str, str]) -> tuple[str, list[str], str]:
    told, asked, answer = row
    asks = [_me(tidy(fill(one_of(rng, asked), words))) for _ in range(3)]
    return _me(tidy(fill(one_of(rng, told), words))), asks, tidy(fill(answer, words))


def _me(text: str) -> str:
    return re.sub(r"\bi\b(?!\.)", "I", re.sub(r" 'm\b", "'m", text))


def led(rng: Random, text: str) -> str:
    """Return what is told with words before it, as people write."""
    lead = one_of(rng, LEAD) if rng.random() < 0.5 else ""
    if not lead.strip():
        return text
    return _me(tidy(f"{lead} {_small(text)}"))


def _small(text: str) -> str:
    first = text.split()[0]
    return text[0].lower() + text[1:] if first.rstrip(",:") in SMALL else text


SMALL = frozenset(["My", "The", "In", "At", "On", "As", "For", "Of", "Our", "We", "There", "They", "This", "That", "It", "Here", "You", "If", "Home", "Hi,", "Hello,", "Hey,", "To", "With", "From", "Under", "Behind", "Next", "A", "An", "Who", "Where", "Everybody", "Somebody", "People"])  # fmt: skip


def talk(rng: Random, between) -> list[Pair]:
    """Tell one to three things about oneself, and be asked; sometimes one is changed, or another thing is asked."""
    count = rng.choice((1, 1, 1, 2, 2, 3))
    told: list = []
    while len(told) < count:
        new = fact(rng)
        if all(new[3] is not old[3] for old in told):
            told.append(new)
    name = lambda f: f[2].startswith("Your name is")  # noqa: E731
    ack = lambda f: f"Nice to meet you, {f[2][13:-1]}!" if name(f) else ACKS  # noqa: E731
    if rng.random() < 0.25:
        said, asks, answer, _ = told[0]
        return [(f"{led(rng, said)} {rng.choice(asks)}", answer)]
    pairs = [(led(rng, f[0]), ack(f)) for f in told]
    if count > 1 and rng.random() < 0.4:
        pairs = [(" ".join(f[0] for f in told), ack(told[0]))]
    if rng.random() < 0.3:
        pairs += between(rng)
    if rng.random() < 0.2:
        _, _, _, row = told[0]
        said, asks, answer = _said(rng, row, _words(rng, row))
        fix = one_of(rng, FIXES) if rng.random() < 0.8 else ""
        new = (said, asks, answer, row)
        pairs.append((_me(tidy(f"{fix} {_small(said)}")), ack(new)))
        told[0] = new
    rng.shuffle(told)
    pairs += [(rng.choice(f[1]), f[2]) for f in told]
    if rng.random() < 0.12:
        other = fact(rng)
        if all(other[3] is not f[3] for f in told):
            pairs.append((rng.choice(other[1]), NOT_TOLD))
    return pairs
