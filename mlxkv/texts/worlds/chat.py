"""Chat: messages in the roles of the chat template, from greetings to questions about a text."""

from random import Random

from mlxkv.texts.worlds import drills, facts
from mlxkv.texts.worlds.facts import label
from mlxkv.texts.worlds.grammar import article, listed, made_up_name, ways
from mlxkv.texts.worlds.knowledge import BEYOND, SMALL_TALK, SORRY
from mlxkv.texts.worlds.stories import Story, plot, simulate
from mlxkv.texts.worlds.words import (
    ANIMALS,
    COLOURS,
    DISHES,
    HOBBIES,
    JOBS,
    PEOPLE,
    PETS,
    THINGS,
    TOWNS,
)

Message = dict[str, str]
Pair = tuple[str, str]

SYSTEMS = (
    "You are a helpful assistant.",
    "You answer in short, simple sentences.",
    "You are a friendly helper.",
)


def small_talk(rng: Random) -> list[Pair]:
    """Return a greeting or another everyday line, with its answer."""
    forms, answer = rng.choice(SMALL_TALK)
    return [(rng.choice(forms), answer)]


def beyond(rng: Random) -> list[Pair]:
    """Return a request that the models cannot meet, and the answer that says so."""
    x, y = (
        rng.choice((made_up_name(rng), made_up_name(rng).lower(), label(rng))) for _ in range(2)
    )
    return [(rng.choice(BEYOND).replace("{x}", x).replace("{y}", y), SORRY)]


def casual(rng: Random, pair: Pair) -> Pair:
    """Sometimes return the question in lower case without its question mark."""
    question, answer = pair
    return (question.lower().rstrip("?."), answer) if rng.random() < 0.1 else pair


def tell_story(rng: Random) -> list[Pair]:
    """Return a request for a story, the story, and sometimes a question about it."""
    ask = (
        "Tell me a story",
        "Tell me a short story",
        "Can you tell me a story",
        "Please write a short story",
        "I want to hear a story",
        "Write a story",
    )
    request = rng.choice(ask)
    topics = {
        "animal": rng.choice([name for name in ANIMALS if name != "owl"]),
        "thing": f"{rng.choice(COLOURS[:5])} {rng.choice(THINGS)}",
    }
    topic = rng.choice(("", "", "a", "animal", "thing"))
    if topic == "a":
        told = plot(rng, a="")
        request += f" about {told.hero}"
    elif topic:
        told = plot(rng, **{topic: topics[topic]})
        request += f" about {article(topics[topic])}"
    else:
        told = plot(rng)
    request += "?" if request.startswith("Can") else "."
    pairs = [(request, told.text)]
    if rng.random() < 0.5:
        pairs.append(told.ask(rng))
    return pairs


def about_text(rng: Random, split: str = "train", asked: int = 3) -> list[Pair]:
    """Return a text and questions about it, the first in the same turn."""
    told: Story = simulate(rng) if rng.random() < 0.65 else plot(rng)
    pairs = [told.ask(rng, split) for _ in range(rng.randrange(1, asked + 1))]
    lead = rng.choice(("", "", "Read this story. ", "Here is a text: "))
    gap = rng.choice((" ", "\n\n"))
    others = [name for name, answer in told.where.items() if answer != pairs[-1][1]]
    if pairs[-1][1] in told.where.values() and others and asked > 1 and rng.random() < 0.5:
        name = rng.choice(others)
        form = rng.choice(("And {}?", "And where is {}?", "What about {}?"))
        pairs.append((form.format(name), told.where[name]))
    return [(f"{lead}{told.text}{gap}{pairs[0][0]}", pairs[0][1]), *pairs[1:]]


def about_you(rng: Random, split: str = "train", between: list[Pair] | None = None) -> list[Pair]:
    """Return a chat in which users tell about themselves and ask for it some turns later."""
    name = rng.choice(PEOPLE) if rng.random() < 0.5 else made_up_name(rng, split)
    told = {
        "name": (
            f"My name is {name}.",
            "what is my name",
            "what my name is",
            f"Your name is {name}.",
        ),
        "town": (
            f"I live in {(town := rng.choice(TOWNS))}.",
            "where do I live",
            "where I live",
            f"You live in {town}.",
        ),
        "job": (
            f"I work as {article(job := rng.choice(JOBS))}.",
            "what is my job",
            "what my job is",
            f"You work as {article(job)}.",
        ),
        "pet": (
            f"I have {article(pet := rng.choice(PETS))}.",
            "what pet do I have",
            "what pet I have",
            f"You have {article(pet)}.",
        ),
        "food": (
            f"I like {(dish := rng.choice(DISHES))}.",
            "what food do I like",
            "what food I like",
            f"You like {dish}.",
        ),
        "hobby": (
            f"My hobby is {(hobby := rng.choice(HOBBIES))}.",
            "what is my hobby",
            "what my hobby is",
            f"Your hobby is {hobby}.",
        ),
        "colour": (
            f"My favourite colour is {(colour := rng.choice(COLOURS))}.",
            "what is my favourite colour",
            "what my favourite colour is",
            f"Your favourite colour is {colour}.",
        ),
    }
    topics = rng.sample(tuple(told), rng.randrange(1, 4))
    pairs = [(" ".join(told[t][0] for t in topics), "Thank you, I will remember that.")]
    pairs += between or [drills.ask(rng, split) for _ in range(rng.randrange(0, 2))]
    for topic in rng.sample(topics, len(topics)):
        _, direct, indirect, answer = told[topic]
        forms = ways(direct, indirect)[:6]
        form = facts.choose_form(rng, topic, 0, len(forms), split)
        pairs.append((forms[form], answer))
    return pairs


def make_list(rng: Random) -> list[Pair]:
    """Return a request for a list of things of one kind, where any of them is right."""
    kinds = {
        "fruits": [
            "apples",
            "pears",
            "plums",
            "cherries",
            "peaches",
            "grapes",
            "lemons",
            "berries",
        ],
        "animals": [many for many, _, _ in ANIMALS.values()],
        "colours": COLOURS,
        "jobs": JOBS,
        "names": PEOPLE,
        "dishes": DISHES,
        "things": THINGS,
        "towns": TOWNS,
        "vegetables": ["carrots", "potatoes", "onions", "beans", "tomatoes", "mushrooms"],
    }
    kind = rng.choice(tuple(kinds))
    n = rng.randrange(3, 7)
    word = ["two", "three", "four", "five", "six", "seven"][n - 2]
    ask = (
        "Name {} {}.",
        "List {} {}.",
        "Give me {} {}.",
        "Tell me {} {}.",
        "Please write down {} {}.",
        "Can you name {} {}?",
    )
    items = sorted(rng.sample(kinds[kind], n))  # in order: so that none comes twice
    if rng.random() < 0.3:
        return [
            (
                rng.choice(ask).format(word, kind),
                "\n".join(f"{i}. {x}" for i, x in enumerate(items, 1)),
            )
        ]
    return [(rng.choice(ask).format(word, kind), f"Here are {word} {kind}: {listed(items)}.")]


def conversation(rng: Random, topics: int = 3) -> list[Pair]:
    """Return a training conversation about one to `topics` topics of mixed kinds."""
    if topics > 6:  # a long one: told at its start, asked at its end
        return about_you(rng, between=conversation(rng, 6) + conversation(rng, topics - 6))
    pairs: list[Pair] = small_talk(rng) if rng.random() < 0.15 else []
    for _ in range(rng.randrange(1, topics + 1)):
        roll = rng.random()
        if roll < 0.36:
            pairs += about_text(rng)
        elif roll < 0.70:
            pairs.append(casual(rng, drills.ask(rng)))
        elif roll < 0.82:
            pairs += about_you(rng)
        elif roll < 0.90:
            pairs += tell_story(rng)
        elif roll < 0.94:
            pairs += make_list(rng)
        elif roll < 0.97:
            pairs += beyond(rng)
        else:
            pairs += small_talk(rng)
    return pairs


def messages(pairs: list[Pair], system: str = "") -> list[Message]:
    """Return pairs of (user, assistant) as chat messages."""
    out = [{"role": "system", "content": system}] if system else []
    for user, assistant in pairs:
        out += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    return out


def chat_questions(split: str = "test", n: int = 50) -> list[tuple[list[Message], str]]:
    """Return `n` chats that end in a question, each with its one right answer.

    Seeds, made-up names and pairs of (how it was said, how it is asked) are those of the split, so
    that none of the test questions can have been seen in training.
    """
    rng = Random(f"chat-questions-{split}")
    out: list[tuple[list[Message], str]] = []
    while len(out) < n:
        kind = len(out) % 5
        if kind == 0:
            pairs = about_you(rng, split)
        elif kind in (1, 2):
            pairs = about_text(rng, split, asked=1)
        else:
            pairs = [drills.ask(rng, split)]
        chat = messages(pairs)
        out.append((chat[:-1], chat[-1]["content"]))
    return out
