# ruff: noqa: E501 - phrases of one meaning a line read better than wrapped ones
"""Everyday facts in many wordings: tables, and what chat.talk knows."""

from random import Random

from chat import talk
from chat.grammar.asking import reworded
from chat.grammar.phrases import one_of
from chat.vocabulary import a
from mlxkv.texts.worlds import words as worlds

Pair = tuple[str, str]
# whole, part, how many, answer
COUNTS = (("week", "days", "A week has 7 days."), ("year", "months", "A year has 12 months."), ("year", "days", "A year has 365 days."), ("day", "hours", "A day has 24 hours."), ("hour", "minutes", "An hour has 60 minutes."), ("minute", "seconds", "A minute has 60 seconds."), ("year", "weeks", "A year has 52 weeks."), ("year", "seasons", "The four seasons are spring, summer, autumn and winter."), ("spider", "legs", "A spider has 8 legs."), ("dog", "legs", "A dog has 4 legs."), ("cat", "legs", "A cat has 4 legs."), ("bird", "legs", "A bird has 2 legs."), ("horse", "legs", "It has 4 legs."), ("cow", "legs", "It has 4 legs."), ("insect", "legs", "It has 6 legs."), ("bee", "legs", "It has 6 legs."), ("ant", "legs", "It has 6 legs."), ("hand", "fingers", "A hand has 5 fingers."), ("car", "wheels", "A car has 4 wheels."), ("bicycle", "wheels", "A bicycle has 2 wheels."), ("person", "eyes", "A person has 2 eyes."), ("triangle", "sides", "A triangle has 3 sides."), ("square", "sides", "A square has 4 sides."), ("rainbow", "colours", "A rainbow has 7 colours."))  # fmt: skip
GIVES = (("bees", "bee", "make", "honey", "Bees make honey."), ("hens", "hen", "lay", "eggs", "Hens lay eggs."), ("cows", "cow", "give", "milk", "Cows give milk."), ("sheep", "sheep", "give", "wool", "Sheep give wool."), ("spiders", "spider", "make", "webs", "Spiders make webs."))  # fmt: skip
OPPOSITES = worlds.OPPOSITES | {"hot": "cold", "cold": "hot", "big": "small", "small": "big", "thin": "thick", "fast": "slow", "slow": "fast", "happy": "sad", "sad": "happy", "light": "dark", "dark": "light", "new": "old", "hard": "soft", "soft": "hard", "wet": "dry", "dry": "wet", "good": "bad", "bad": "good", "near": "far", "rich": "poor", "poor": "rich", "high": "low", "low": "high", "long": "short", "strong": "weak", "heavy": "light", "young": "old", "open": "closed", "full": "empty", "empty": "full", "clean": "dirty", "loud": "quiet", "early": "late"}  # fmt: skip
COLOURS = worlds.COLOUR_OF | {"the sky": "blue", "the sun": "yellow", "the sea": "blue", "grass": "green", "snow": "white", "a banana": "yellow", "a lemon": "yellow", "a tomato": "red", "an orange": "orange", "a carrot": "orange", "a frog": "green", "a strawberry": "red", "an elephant": "grey", "a cloud": "white", "a crow": "black", "night": "black", "a leaf": "green", "a pig": "pink", "a cherry": "red", "fire": "red", "paper": "white", "a cucumber": "green", "rice": "white", "coffee": "brown"}  # fmt: skip


def whether(rng: Random) -> Pair:
    """Is it, can it: answered with yes or no, in many wordings."""
    roll = rng.random()
    if roll < 0.5:
        x, kind = rng.choice(talk.IS_A)
        other = rng.choice([k for _, k in talk.IS_A if k not in (kind, "animal")])
        y = kind if rng.random() < 0.5 else other
        right, question = y == kind, f"Is {a(x)} {a(y)}?"
        true = f"{a(x)} is {a(kind)}."
    elif roll < 0.75:
        x, do, right = rng.choice(talk.CAN_DO)
        question, true = f"Can {x} {do}?", f"{x} {'can' if right else 'cannot'} {do}."
    else:
        x, yes, no = rng.choice(talk.TRUE[1])
        right = rng.random() < 0.5
        question, true = f"Is {x} {yes if right else no}?", f"{x} is {yes}."
    return reworded(rng, question, 0.8), f"{'Yes' if right else 'No'}, {true}"


def known(rng: Random) -> Pair:
    """Return an everyday question in one of many wordings."""
    roll = rng.random()
    if roll < 0.12:
        return whether(rng)
    if roll < 0.4:
        question, answer = talk.knowledge(rng)
        return reworded(rng, question, 0.8), answer
    if roll < 0.55:
        whole, part, answer = rng.choice(COUNTS)
        x = a(whole)
        n = answer.split()[-2] if answer.split()[-1] == part + "." else ""
        if n.isdigit() and rng.random() < 0.2:
            said = n if rng.random() < 0.5 else str(int(n) + rng.choice((1, -1, 2)))
            ask = one_of(rng, f"(does|has) {x} (have|got) {said} {part}?|are there {said} {part} in {x}?|{x} has {said} {part}, (right|correct|yes or no)?|is it (true|correct) that {x} has {said} {part}?|does {x} have {said} {part} or not?").replace("Has " + x + " have", "Has " + x + " got").replace("Does " + x + " got", "Does " + x + " have")  # fmt: skip
            true = answer[0].lower() + answer[1:]
            return ask, f"{'Yes' if said == n else 'No'}, {true}"
        return one_of(rng, f"{x} has how many {part}?|(what|which) (is the|) number of {part} (has|does) {x}(| have)?|(the|) number of {part} (of|in|on) {x}?|how many {part} (does|has|will) {x} (have|own|got|contain)?|how many {part} (are there|are|do you find|do we count|can one count|do you see) (in|on|with) {x}?|(tell me|say|do you know|i forgot|remind me|i want to know|can you say|guess) how many {part} {x} has(.|?)|{part} (of|in|per) {x}?|(in|with|for) {x}, how many {part} (are there|do you count)?|{x}: how many {part}?|how many {part}, if you (look at|think of|have) {x}?|(a whole|one|every|each) {whole} has how many {part}?|(count|name) the number of {part} of {x}.|{part} in {x} - how many?|{whole}s have how many {part}?|how many {part} (in all|altogether) has {x}?|(each|one|every) {whole} (consists of|comes with|is made of|counts) how many {part}?"), answer  # fmt: skip
    if roll < 0.67:
        land, town = rng.choice(tuple(worlds.CAPITALS.items()))
        back = rng.random()
        if back < 0.25:
            return one_of(rng, f"{town} is the capital of (which|what) (country|land|state)?|(which|what) (country|land|state) (has|calls) {town} (as|its) capital?|of (which|what) country is {town} the capital?|in (which|what) (country|land) (is|lies) {town}?|{town} is in (which|what) (country|land)?|(which|what) country's capital is {town}?|(name|tell me|say) the country with the capital {town}.|{town} belongs to (which|what) country?|where is {town}?|{town}, capital of?|if {town} is the capital, (what|which) is the country?"), f"{town} is the capital of {land}."  # fmt: skip
        if back < 0.4:
            said = town if rng.random() < 0.5 else rng.choice(tuple(worlds.CAPITALS.values()))
            yes = f"the capital of {land} is {town}."
            return one_of(rng, f"is {said} the capital of {land}?|is the capital of {land} {said}?|{said} is the capital of {land}, (right|correct|yes or no)?|is it (true|correct) that {said} is the capital of {land}?|does {land} have the capital {said}?|(do you think|am i right) that {said} is the capital of {land}?"), f"{'Yes' if said == town else 'No'}, {yes}"  # fmt: skip
        return one_of(rng, f"(what|which|which city|what city|which town) is (the capital|the capital city|the main city) of {land}?|the capital of {land}(?|, please| is| is called?| is which city?| is what?)|{land} has (which|what) (capital|city as its capital)?|{land}: capital?|{land}'s capital( city|)(?| is|, please)|(tell me|say|name|give me|do you know|i need|i forgot|write|can you name|remind me of) the capital (city |)of {land}(.|?)|(which|what) (capital|capital city) (has|does) {land}( have|)?|(in|for) {land}, (what|which city) is the capital?|if i (go|fly|travel) to {land}, (what|which city) is the capital?|(which|what) city (rules|governs|leads) {land}?|capital city of {land}?|as capital, {land} has (which|what) city?|from (which|what) city is {land} (ruled|governed)?|how is the capital of {land} called?|what's {land}'s capital (city|)?"), f"The capital of {land} is {town}."  # fmt: skip
    if roll < 0.77:
        x, y = rng.choice(tuple(OPPOSITES.items()))
        if rng.random() < 0.2:
            said = y if rng.random() < 0.5 else rng.choice(tuple(OPPOSITES))
            return one_of(rng, f"is {said} the opposite of {x}?|is the opposite of {x} {said}?|{said} is the opposite of {x}, (right|correct)?"), f"{'Yes' if said == y else 'No'}, the opposite of {x} is {y}."  # fmt: skip
        return one_of(rng, f"(what|which word|which) is the (opposite|reverse|contrary|other side) of {x}?|the (opposite|contrary|reverse) (of|to|for) {x}(?| is?|, please)|{x} is the opposite of (what|which word)?|(which|what) word (is opposite to|means the opposite of|means not) {x}?|(tell me|say|name|give me|write) the (opposite|contrary) of {x}(.| please)|not {x} (means|but)?|{x}, and the opposite(| is| word)?|{x} - opposite?|what do (you|we) call the opposite of {x}?|one is {x}, the other is the opposite: (what is it|which)?|(what|which word) (goes|stands) against {x}?|if it is the opposite of {x}, (what|how) is it?|{x} and ...? (give me|say) the opposite.|turn {x} into its opposite.|how do you say the opposite of {x}?|it is not {x}, it is the opposite. (what|how) is it?"), f"The opposite of {x} is {y}."  # fmt: skip
    if roll < 0.9:
        x, hue = rng.choice(tuple(COLOURS.items()))
        be = f"{x[0].upper()}{x[1:]} is {hue}."
        if rng.random() < 0.3:
            said = hue if rng.random() < 0.5 else rng.choice(("red", "blue", "green", "black", "white", "yellow"))  # fmt: skip
            return one_of(rng, f"is {x} {said}?|{x} is {said}, (right|yes or no|correct|true)?|is it (true|correct|a fact) that {x} is {said}?|is {said} the colour of {x}?|(do you think|would you say|am i right) (that|) {x} is {said}?|has {x} the colour {said}?|should i paint {x} {said}?|i think {x} is {said}. (right|am i right|correct)?|(yes or no|tell me)(:|,) is {x} {said}?|can {x} be {said}?"), f"{'Yes' if said == hue else 'No'}, {x} is {hue}."  # fmt: skip
        return one_of(rng, f"(what|which) colour (is|does) {x}( have|)?|{x} (is|has got|shows|comes in) (what|which) colour?|(what|which) is the colour of {x}?|the colour of {x}(?| is?|, please)|{x}: (what|which) colour?|in (what|which) colour (do i paint|should i draw|is) {x}?|(tell me|say|name|give me|do you know|i forgot|write) the colour of {x}(.|?)|(what|which) colour (would you give|do you see on|do people give to|would you paint) {x}?|(tell me|say|do you know|can you say) (what|which) colour {x} (is|has)(.|?)|if you (look at|paint|think of|draw) {x}, (what|which) colour (do you see|is it|do you take|comes to mind)?|how does {x} look?|of (what|which) colour is {x}?|mostly, {x} is (what|which) colour?"), be  # fmt: skip
    if roll < 0.95:
        x, y = rng.choice(tuple(talk.SOUNDS.items()))
        many = {"sheep": "sheep", "mouse": "mice"}.get(x, x + "s")
        return one_of(rng, f"what (does|do) {a(x)} say?|what do {many} say?|(what|which) (sound|noise) (do {many}|does {a(x)}|comes from {a(x)}|is made by {a(x)})( make|)?|the (sound|noise|voice) of {a(x)}(?| is?)|{a(x)} (says|makes|cries) (what|which sound)?|{many} (say|make|cry) (what|which sound)?|(make|do|imitate) (the sound of|) {a(x)}(.| for me)|how (do {many}|does {a(x)}) sound?|(tell me|say) what {a(x)} says.|if {a(x)} speaks, what do you hear?|what do you hear from {a(x)}?"), f"{a(x).capitalize()} says {y}."  # fmt: skip
    many, one, do, what, answer = rng.choice(GIVES)
    return one_of(rng, f"what do {many} {do}?|what (does|do) {a(one)} {do}?|(who|which animal|what animal|what|which animals) ({do}|{do}s) (us|) {what}?|{what} (comes|come) from (what|which animal|where|which animals)?|(where|from where) (do|does) {what} come( from|)?|{many} {do} (us|) what?|(tell me|say|do you know) (who|which animal) {do}s {what}(.|?)|{what} is made by (whom|which animal|what)?|the animal that {do}s {what} is?|{what}: which animal?|by which animal is {what} {'made' if do == 'make' else 'given'}?|(name|tell me) the animal that {do}s {what}."), answer  # fmt: skip
