"""Chats that end in a question with one right answer, as messages in the roles of the chat template."""

from random import Random

from mlxkv.texts.worlds import drills
from mlxkv.texts.worlds.grammar import article, choose_form, made_up_name, ways
from mlxkv.texts.worlds.stories import Story, plot, simulate
from mlxkv.texts.worlds.words import COLOURS, DISHES, HOBBIES, JOBS, PEOPLE, PETS, TOWNS

Message = dict[str, str]
Pair = tuple[str, str]


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


def about_you(rng: Random, split: str = "train") -> list[Pair]:
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
    pairs += [drills.ask(rng, split) for _ in range(rng.randrange(0, 2))]
    for topic in rng.sample(topics, len(topics)):
        _, direct, indirect, answer = told[topic]
        forms = ways(direct, indirect)[:6]
        form = choose_form(rng, topic, 0, len(forms), split)
        pairs.append((forms[form], answer))
    return pairs


def messages(pairs: list[Pair]) -> list[Message]:
    """Return pairs of (user, assistant) as chat messages."""
    out: list[Message] = []
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
