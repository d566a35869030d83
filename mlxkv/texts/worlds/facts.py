"""Facts: a relation of a key and a value, stated and asked in many ways, answered in one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from mlxkv.texts.worlds.grammar import capital, choose_form, listed, made_up_name
from mlxkv.texts.worlds.words import PEOPLE


@dataclass(frozen=True)
class Relation:
    """A kind of fact. `{k}` stands for the key, `{v}` for the value, `{ks}` for several keys."""

    name: str
    statements: tuple[str, ...]
    questions: tuple[str, ...]  # six or more: a part of the pairs (statement, question) is held out
    answer: str  # without the full stop
    many: tuple[str, ...]  # questions for several keys at once
    value: Callable[[Random], str]


@dataclass(frozen=True)
class Fact:
    """One fact. `said` is the form in which the text states it."""

    relation: Relation
    key: str
    value: str
    said: int

    @property
    def sentence(self) -> str:
        return fill(self.relation.statements[self.said], self.key, self.value)


def fill(form: str, key: str, value: str = "") -> str:
    """Return a form with key and value filled in, as a sentence with a capital letter."""
    return capital(form.replace("{k}", key).replace("{v}", value))


def four_digits(rng: Random) -> str:
    """Return a code of four digits."""
    return str(rng.randrange(1000, 10000))


CODE = Relation(
    name="code",
    statements=(
        "the code of {k} is {v}.",
        "{k}'s code is {v}.",
        "for {k}, the code is {v}.",
        "please note that the code of {k} is {v}.",
        "a note said that {k}'s code is {v}.",
        "{k} has the code {v}.",
        "remember that {k}'s code is {v}.",
        "on the wall it said that the code of {k} is {v}.",
    ),
    questions=(
        "What is the code of {k}?",
        "What is {k}'s code?",
        "Which code does {k} have?",
        "Tell me the code of {k}.",
        "Can you tell me {k}'s code?",
        "Do you remember the code of {k}?",
        "I need the code of {k}.",
        "Please give me {k}'s code.",
        "According to the text, what is the code of {k}?",
    ),
    answer="the code of {k} is {v}",
    many=(
        "What are the codes of {ks}?",
        "Tell me the codes of {ks}.",
        "Which codes do {ks} have?",
        "I need the codes of {ks}.",
        "Please give me the codes of {ks}.",
        "Can you list the codes of {ks}?",
    ),
    value=four_digits,
)


def new_key(rng: Random, split: str) -> str:
    """Return a name. Half of the names are made up; in the test split all of them are."""
    if split == "test" or rng.random() < 0.5:
        return made_up_name(rng, split)
    if rng.random() < 0.5:
        return rng.choice(PEOPLE)
    return f"{rng.choice(PEOPLE)} {made_up_name(rng, split)}"  # a surname


def new_facts(rng: Random, relation: Relation, n: int, names: str = "train") -> list[Fact]:
    """Return `n` facts of one relation with different keys. names: the split of made-up names."""
    keys: dict[str, None] = {}
    while len(keys) < n:
        keys[new_key(rng, names)] = None
    said = len(relation.statements)
    return [Fact(relation, key, relation.value(rng), rng.randrange(said)) for key in keys]


def ask(rng: Random, fact: Fact, split: str = "train") -> tuple[str, str]:
    """Return a question about the fact, and its answer."""
    rel = fact.relation
    form = choose_form(rng, rel.name, fact.said, len(rel.questions), split)
    return fill(rel.questions[form], fact.key), fill(rel.answer, fact.key, fact.value) + "."


def ask_many(rng: Random, facts: Sequence[Fact]) -> tuple[str, str]:
    """Return a question for the values of several keys, and its answer in one sentence."""
    rel = facts[0].relation
    question = rng.choice(rel.many).replace("{ks}", listed([f.key for f in facts]))
    clauses = [rel.answer.replace("{k}", f.key).replace("{v}", f.value) for f in facts]
    return capital(question), capital(listed(clauses)) + "."


def ask_values(rng: Random, facts: Sequence[Fact]) -> tuple[str, str]:
    """Return a question for all values of one key of a numbered relation, and its answer."""
    noun, key = facts[0].relation.name, facts[0].key
    forms = (
        "What are the {n}s of {k}?",
        "Tell me all the {n}s of {k}.",
        "What are {k}'s {n}s?",
        "Which {n}s does {k} have?",
        "I need all of {k}'s {n}s.",
    )
    values = listed([fact.value for fact in facts])
    question = rng.choice(forms).replace("{n}", noun).replace("{k}", key)
    return question, f"The {noun}s of {key} are {values}."


def more_values(rng: Random, fact: Fact, n: int) -> list[Fact]:
    """Return `n` facts with the key of `fact` and different values, its own first."""
    said = len(fact.relation.statements)
    values = {fact.value: None}
    while len(values) < n:
        values[fact.relation.value(rng)] = None
    return [Fact(fact.relation, fact.key, value, rng.randrange(said)) for value in values]
