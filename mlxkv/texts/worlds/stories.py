"""Stories: plots with their slots filled in, and small simulated worlds whose state changes."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

from mlxkv.texts.worlds.grammar import capital, choose_form, counted, number, ways
from mlxkv.texts.worlds.plots_away import AWAY
from mlxkv.texts.worlds.plots_home import HOME
from mlxkv.texts.worlds.words import (
    ANIMALS,
    COLOURS,
    COUNTABLES,
    DISHES,
    FOOD,
    JOBS,
    MOODS,
    PEOPLE,
    PLACES,
    SPOTS,
    THINGS,
    TIMES,
    WEATHER,
    at,
    on,
    pronouns,
)

PLOTS = HOME + AWAY
_OUTSIDE = ("garden", "park", "hill", "meadow", "farm", "village", "valley", "forest")


@dataclass
class Story:
    """Sentences, and questions about them: (ways to ask, answer, how the text said it).

    `where` answers 'And NAME?' after a question about the place of somebody else.
    """

    sentences: list[str] = field(default_factory=list)
    questions: list[tuple[tuple[str, ...], str, int]] = field(default_factory=list)
    where: dict[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return " ".join(self.sentences)

    def ask(self, rng: Random, split: str = "train") -> tuple[str, str]:
        """Return a question about the story, and its answer."""
        forms, answer, said = rng.choice(self.questions)
        return forms[choose_form(rng, answer[-4:], said, len(forms), split)], answer


def _slots(rng: Random) -> dict[str, str]:
    a, b = rng.sample(PEOPLE, 2)
    place, place2 = rng.sample(tuple(PLACES), 2)
    animal = rng.choice([name for name in ANIMALS if name != "owl"])  # the plots say 'a'
    she, her, hers = pronouns(a)
    bshe, _, bher = pronouns(b)
    thing, thing2 = rng.sample(THINGS, 2)
    colour, colour2 = rng.sample([c for c in COLOURS if c != "orange"], 2)
    time, time2 = rng.sample(TIMES[:3], 2)
    return {
        "a": a,
        "b": b,
        "she": she,
        "her": her,
        "hers": hers,
        "bshe": bshe,
        "bher": bher,
        "place": place,
        "place2": place2,
        "at": at(place),
        "at2": at(place2),
        "out": at(rng.choice(_OUTSIDE)),
        "animal": animal,
        "animals": ANIMALS[animal][0],
        "thing": f"{colour} {thing}",
        "thing2": f"{colour2} {thing2}",
        "colour": colour,
        "colour2": colour2,
        "time": time,
        "time2": time2,
        "foods": FOOD[rng.choice(tuple(FOOD))],
        "n": number(rng.randrange(2, 10)),
        "weather": rng.choice(WEATHER),
        "mood": rng.choice(("sad", "angry", "tired", "nervous")),
        "mood2": rng.choice(("happy", "surprised", "excited", "glad")),
        "dish": rng.choice(DISHES),
        "spot": on(rng.choice(tuple(SPOTS))),
        "job": rng.choice([j for j in JOBS if j[0] not in "aeiou"]),
    }


def plot(rng: Random) -> Story:
    """Return a story of one of the plots."""
    steps, questions = rng.choice(PLOTS)
    slots, story = _slots(rng), Story()
    said = [rng.randrange(len(forms)) for forms in steps]
    for form, forms in zip(said, steps, strict=True):
        text = forms[form].format_map(slots)
        story.sentences.append(capital(text) if text[0] != '"' else text)
    for n, (direct, indirect, answer) in enumerate(questions):
        filled = [t.format_map(slots) for t in (direct, indirect, answer)]
        story.questions.append((ways(*filled[:2]), filled[2], said[n] + 3 * n))
    return story


class World:
    """People, things and places; each event changes the state and tells it in a sentence."""

    def __init__(self, rng: Random, people: int = 3, things: int = 3):
        self.rng = rng
        self.people = rng.sample(PEOPLE, people)
        self.places = rng.sample(tuple(PLACES), 4)
        self.room = {name: rng.choice(self.places) for name in self.people}
        self.holder: dict[str, str] = {}
        self.spot: dict[str, tuple[str, str]] = {}  # thing -> (spot, place)
        self.mood: dict[str, str] = {}
        self.said: dict[str, int] = {}  # the form in which a state was told last
        self.sentences: list[str] = []
        self.subject = ""
        for colour, thing in zip(
            rng.sample(COLOURS, things), rng.sample(THINGS, things), strict=True
        ):
            self.spot[f"{colour} {thing}"] = (rng.choice(tuple(SPOTS)), rng.choice(self.places))
        self.food = rng.choice(tuple(COUNTABLES))
        self.count = dict.fromkeys(self.people, 0)
        self._open()

    def _tell(self, about: str, who: str, *forms: str) -> None:
        """Say one of the forms; `{a}` and `{him}` are the person, a pronoun if just mentioned."""
        n = self.rng.randrange(len(forms))
        self.said[about] = n
        name, him = who, who
        if who == self.subject and self.rng.random() < 0.6:
            name, him, _ = pronouns(who)
        self.subject = who
        self.sentences.append(capital(forms[n].replace("{a}", name).replace("{him}", him)))

    def _open(self) -> None:
        for name in self.people:
            place = at(self.room[name])
            self._tell(
                name, name, f"{{a}} was {place}.", f"{{a}} stood {place}.", f"{{a}} waited {place}."
            )
        for thing, (spot, place) in self.spot.items():
            where = f"{on(spot)} {at(place)}"
            self._tell(
                thing,
                "",
                f"The {thing} was {where}.",
                f"There was a {thing} {where}.".replace(" a o", " an o"),
            )

    def step(self) -> None:
        """Make one event happen."""
        who = self.rng.choice(self.people)
        events = (
            self._go,
            self._go,
            self._take,
            self._take,
            self._put,
            self._give,
            self._feel,
            self._get,
            self._lose,
        )
        self.rng.choice(events)(who)

    def _go(self, who: str) -> None:
        place = self.rng.choice([p for p in self.places if p != self.room[who]])
        self.room[who] = place
        self._tell(
            who,
            who,
            f"{{a}} went to the {place}.",
            f"Then {{a}} walked to the {place}.",
            f"{{a}} ran to the {place}.",
            f"After that, {{a}} moved to the {place}.",
        )

    def _take(self, who: str) -> None:
        here = [t for t, (_, place) in self.spot.items() if place == self.room[who]]
        if not here:
            return self._go(who)
        thing = self.rng.choice(here)
        del self.spot[thing]
        self.holder[thing] = who
        self._tell(
            thing,
            who,
            f"{{a}} took the {thing}.",
            f"{{a}} picked up the {thing}.",
            f"Now {{a}} has the {thing}.",
            f"Then {{a}} found the {thing} and kept it.",
        )

    def _put(self, who: str) -> None:
        mine = [t for t, holder in self.holder.items() if holder == who]
        if not mine:
            return self._take(who)
        thing, spot = self.rng.choice(mine), self.rng.choice(tuple(SPOTS))
        del self.holder[thing]
        self.spot[thing] = (spot, self.room[who])
        where = f"{on(spot)} {at(self.room[who])}"
        self._tell(
            thing,
            who,
            f"{{a}} put the {thing} {where}.",
            f"{{a}} left the {thing} {where}.",
            f"Then {{a}} hid the {thing} {where}.",
        )

    def _give(self, who: str) -> None:
        mine = [t for t, holder in self.holder.items() if holder == who]
        near = [p for p in self.people if p != who and self.room[p] == self.room[who]]
        if not mine or not near:
            return self._put(who)
        thing, other = self.rng.choice(mine), self.rng.choice(near)
        self.holder[thing] = other
        self._tell(
            thing,
            who,
            f"{{a}} gave the {thing} to {other}.",
            f"{{a}} handed the {thing} to {other}.",
            f"{{a}} gave {other} the {thing}.",
        )

    def _feel(self, who: str) -> None:
        mood = self.mood[who] = self.rng.choice(MOODS)
        self._tell(
            f"{who} feels",
            who,
            f"{{a}} was {mood}.",
            f"{{a}} felt {mood}.",
            f"This made {{him}} {mood}.",
        )

    def _get(self, who: str) -> None:
        n = self.rng.randrange(1, 6)
        self.count[who] += n
        what = counted(n, self.food, COUNTABLES[self.food])
        self._tell(
            f"{who} count",
            who,
            f"{{a}} found {what}.",
            f"{{a}} got {what} from a friend.",
            f"{{a}} bought {what}.",
        )

    def _lose(self, who: str) -> None:
        if not self.count[who]:
            return self._get(who)
        n = self.rng.randrange(1, self.count[who] + 1)
        self.count[who] -= n
        what = counted(n, self.food, COUNTABLES[self.food])
        self._tell(
            f"{who} count",
            who,
            f"{{a}} lost {what}.",
            f"{{a}} gave away {what}.",
            f"{{a}} sold {what}.",
        )

    def story(self) -> Story:
        """Return the story so far, with questions about the state of things."""
        story = Story(self.sentences)

        def put(key: str, direct: str, indirect: str, answer: str) -> None:
            story.questions.append((ways(direct, indirect), answer, self.said.get(key, 0)))

        for name, place in self.room.items():
            story.where[name] = f"{name} is {at(place)}."
            put(name, f"where is {name}", f"where {name} is", story.where[name])
            self._ask_whether(story, name, place)
        for thing, name in self.holder.items():
            put(thing, f"who has the {thing}", f"who has the {thing}", f"{name} has the {thing}.")
        for thing, (spot, place) in self.spot.items():
            put(
                thing,
                f"where is the {thing}",
                f"where the {thing} is",
                f"The {thing} is {on(spot)} {at(place)}.",
            )
        for name, mood in self.mood.items():
            put(
                f"{name} feels",
                f"how does {name} feel",
                f"how {name} feels",
                f"{name} feels {mood}.",
            )
        for name, n in self.count.items():
            if f"{name} count" in self.said:
                many = COUNTABLES[self.food]
                put(
                    f"{name} count",
                    f"how many {many} does {name} have",
                    f"how many {many} {name} has",
                    f"{name} has {counted(n, self.food, many)}.",
                )
        return story

    def _ask_whether(self, story: Story, name: str, place: str) -> None:
        guess = self.rng.choice(self.places)
        here, there = f"{name} is {at(place)}", f"{name} is not {at(guess)}"
        answer = f"Yes, {here}." if guess == place else f"No, {there}."
        forms = (
            f"Is {name} {at(guess)}?",
            f"Is it true that {name} is {at(guess)}?",
            f"Can you say if {name} is {at(guess)}?",
            f"Do you think that {name} is {at(guess)}?",
            f"I ask myself if {name} is {at(guess)}.",
            f"According to the text, is {name} {at(guess)}?",
        )
        story.questions.append((forms, answer, self.said.get(name, 0)))


def simulate(rng: Random) -> Story:
    """Return the story of a small world after some events."""
    world = World(rng, people=rng.randrange(2, 4), things=rng.randrange(1, 4))
    for _ in range(rng.randrange(4, 14)):
        world.step()
    return world.story()


def stories(rng: Random) -> Iterator[str]:
    """Yield paragraphs of story text endlessly: three plots for each simulated world."""
    while True:
        yield (plot(rng) if rng.random() < 0.75 else simulate(rng)).text
