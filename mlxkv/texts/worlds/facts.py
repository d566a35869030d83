"""Facts: a relation of a key and a value, stated and asked in many ways, answered in one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from mlxkv.texts.worlds.grammar import article, capital, choose_form, listed, made_up_name, ways
from mlxkv.texts.worlds.words import (
    COLOURS,
    DISHES,
    HOBBIES,
    JOBS,
    KINDS,
    LABELS,
    MONTHS,
    PEOPLE,
    PETS,
    SPOTS,
    THINGS,
    TOWNS,
    on,
)


@dataclass(frozen=True)
class Relation:
    """A kind of fact. `{k}` stands for the key, `{v}` for the value, `{ks}` for several keys."""

    name: str
    statements: tuple[str, ...]
    questions: tuple[str, ...]  # six or more: a part of the pairs (statement, question) is held out
    answer: str  # without the full stop
    many: tuple[str, ...]  # questions for several keys at once
    value: Callable[[Random], str]
    key: str = "person"  # or "thing"


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


def digits(rng: Random) -> str:
    """Return a code of three to five digits, mostly four, without a leading zero."""
    n = rng.choice((3, 4, 4, 4, 5))
    return str(rng.randrange(10 ** (n - 1), 10**n))


def four_digits(rng: Random) -> str:
    """Return a code of four digits."""
    return str(rng.randrange(1000, 10000))


def label(rng: Random) -> str:
    """Return one or two plain words: 'walnut', 'silver comet'."""
    word = rng.choice(LABELS)
    return word if rng.random() < 0.6 else f"{rng.choice(COLOURS)} {word}"


def _numbered(noun: str, value: Callable[[Random], str] = digits) -> Relation:
    """Return relations of one form: 'the NOUN of KEY is VALUE'."""
    return Relation(
        name=noun,
        statements=(
            f"the {noun} of {{k}} is {{v}}.",
            f"{{k}}'s {noun} is {{v}}.",
            f"for {{k}}, the {noun} is {{v}}.",
            f"please note that the {noun} of {{k}} is {{v}}.",
            f"a note said that {{k}}'s {noun} is {{v}}.",
            f"{{k}} has the {noun} {{v}}.",
            f"remember that {{k}}'s {noun} is {{v}}.",
            f"on the wall it said that the {noun} of {{k}} is {{v}}.",
        ),
        questions=(
            f"What is the {noun} of {{k}}?",
            f"What is {{k}}'s {noun}?",
            f"Which {noun} does {{k}} have?",
            f"Tell me the {noun} of {{k}}.",
            f"Can you tell me {{k}}'s {noun}?",
            f"Do you remember the {noun} of {{k}}?",
            f"I need the {noun} of {{k}}.",
            f"Please give me {{k}}'s {noun}.",
            f"According to the text, what is the {noun} of {{k}}?",
        ),
        answer=f"the {noun} of {{k}} is {{v}}",
        many=(
            f"What are the {noun}s of {{ks}}?",
            f"Tell me the {noun}s of {{ks}}.",
            f"Which {noun}s do {{ks}} have?",
            f"I need the {noun}s of {{ks}}.",
            f"Please give me the {noun}s of {{ks}}.",
            f"Can you list the {noun}s of {{ks}}?",
        ),
        value=value,
    )


def _worded(
    name: str,
    answer: str,
    statements: Sequence[str],
    ask: str,
    asks: str,
    value: Callable[[Random], str],
    key: str = "person",
) -> Relation:
    """Return a relation with its own words. `ask` and `asks` are a direct|an indirect question."""
    direct_many, indirect_many = asks.split("|")
    return Relation(
        name=name,
        statements=(f"{answer}.", *statements),
        questions=ways(*ask.split("|")),
        answer=answer,
        many=ways(direct_many, indirect_many),
        value=value,
        key=key,
    )


def _one_of(words: Sequence[str], form: Callable[[str], str] = str) -> Callable[[Random], str]:
    return lambda rng: form(rng.choice(words))


CODE = _numbered("code")
NUMBERED = (
    CODE,
    CODE,
    _numbered("code", four_digits),
    *(_numbered(noun) for noun in ("locker number", "ticket number", "badge number", "pin")),
    _numbered("password", label),
    _numbered("secret word", label),
)
WORDED = (
    _worded(
        "home",
        "{k} lives in {v}",
        ["The home of {k} is in {v}.", "{k} has a house in {v}.", "{k} moved to {v} last year."],
        "where does {k} live|where {k} lives",
        "where do {ks} live|where {ks} live",
        _one_of(TOWNS),
    ),
    _worded(
        "pet",
        "{k} has {v} as a pet",
        ["The pet of {k} is {v}.", "{k} keeps {v} at home.", "At home, {k} takes care of {v}."],
        "what pet does {k} have|what pet {k} has",
        "what pets do {ks} have|what pets {ks} have",
        _one_of(PETS, article),
    ),
    _worded(
        "job",
        "{k} works as {v}",
        ["{k} is {v}.", "The job of {k} is to be {v}.", "For many years, {k} has been {v}."],
        "what is the job of {k}|what the job of {k} is",
        "what are the jobs of {ks}|what the jobs of {ks} are",
        _one_of(JOBS, article),
    ),
    _worded(
        "food",
        "{k} likes {v} best",
        ["The favourite food of {k} is {v}.", "{k}'s favourite food is {v}.", "{k} loves {v}."],
        "what food does {k} like best|what food {k} likes best",
        "what food do {ks} like best|what food {ks} like best",
        _one_of(DISHES),
    ),
    _worded(
        "hobby",
        "the hobby of {k} is {v}",
        ["{k}'s hobby is {v}.", "In the evening, {k} enjoys {v}.", "{k} spends every Sunday {v}."],
        "what is the hobby of {k}|what the hobby of {k} is",
        "what are the hobbies of {ks}|what the hobbies of {ks} are",
        _one_of([h for h in HOBBIES if h.endswith("ing")]),
    ),
    _worded(
        "birthday",
        "the birthday of {k} is in {v}",
        ["{k} was born in {v}.", "{k}'s birthday is in {v}.", "In {v}, {k} has a birthday."],
        "in which month is the birthday of {k}|in which month the birthday of {k} is",
        "in which months are the birthdays of {ks}|in which months the birthdays of {ks} are",
        _one_of(MONTHS),
    ),
    _worded(
        "coat",
        "the coat of {k} is {v}",
        [
            "{k}'s coat is {v}.",
            "{k} wears a coat of {v} wool.",
            "{k} bought a coat, and it is {v}.",
        ],
        "what colour is the coat of {k}|what colour the coat of {k} is",
        "what colours are the coats of {ks}|what colours the coats of {ks} are",
        _one_of(COLOURS),
    ),
    _worded(
        "place",
        "{k} is {v}",
        ["{k} was put {v}.", "Somebody left {k} {v}.", "You can find {k} {v}."],
        "where is {k}|where {k} is",
        "where are {ks}|where {ks} are",
        _one_of(tuple(SPOTS), on),
        key="thing",
    ),
    _worded(
        "price",
        "{k} costs {v} coins",
        [
            "The price of {k} is {v} coins.",
            "You must pay {v} coins for {k}.",
            "They sell {k} for {v} coins.",
        ],
        "how much does {k} cost|how much {k} costs",
        "how much do {ks} cost|how much {ks} cost",
        lambda rng: str(rng.randrange(13, 990)),
        key="thing",
    ),
)
RELATIONS = NUMBERED + WORDED


def new_key(rng: Random, kind: str = "person", split: str = "train") -> str:
    """Return a key. Half of the people have made-up names; in the test split all of them do."""
    if kind == "thing":
        return f"the {rng.choice(KINDS)} {rng.choice(COLOURS)} {rng.choice(THINGS)}"
    if split == "test" or rng.random() < 0.5:
        return made_up_name(rng, split)
    if rng.random() < 0.5:
        return rng.choice(PEOPLE)
    return f"{rng.choice(PEOPLE)} {made_up_name(rng, split)}"  # a surname


def new_facts(rng: Random, relation: Relation, n: int, names: str = "train") -> list[Fact]:
    """Return `n` facts of one relation with different keys. names: the split of made-up names."""
    keys: dict[str, None] = {}
    while len(keys) < n:
        keys[new_key(rng, relation.key, names)] = None
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
