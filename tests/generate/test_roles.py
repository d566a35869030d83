"""Chats in any order of roles become ones that chat templates take, and a chat that grows keeps its beginning."""

from types import SimpleNamespace

from jinja2 import Environment

from mlxkv.generate.roles import alternating, joined, takes_system, without_system


def say(role: str, content: str = "", **more) -> dict:
    return {"role": role, "content": content} | more


S, U, A = say("system", "s"), say("user", "u"), say("assistant", "a")
CALLS = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
CALL, RESULT = say("assistant", tool_calls=CALLS), say("tool", "r", tool_call_id="1")
THOUGHT = say("assistant", "b", reasoning_content="hm")
JOINED = {
    "two of the system": ([S, say("system", "t"), U], [say("system", "s\n\nt"), U]),
    "a late one": ([S, U, A, say("system", "t")], [S, U, A, say("user", "t")]),
    "a late one in front of a question": ([S, U, A, S, U], [S, U, A, say("user", "s\n\nu")]),
    "one behind a question": ([U, S, A], [say("user", "u\n\ns"), A]),
    "two questions": ([U, U, A], [say("user", "u\n\nu"), A]),
    "two answers": ([U, A, say("assistant", "b")], [U, say("assistant", "a\n\nb")]),
    "an answer, then a call": ([U, A, CALL], [U, A | {"tool_calls": CALLS}]),
    "a call, then an answer": ([U, CALL, A], [U, CALL, A]),
    "an answer, then a thought": ([U, A, THOUGHT], [U, A, THOUGHT]),
    "a thought, then more": (
        [U, THOUGHT, A],
        [U, say("assistant", "b\n\na", reasoning_content="hm")],
    ),
    "two results": ([U, CALL, RESULT, RESULT], [U, CALL, RESULT, RESULT]),
    "nothing beside words": ([say("system"), S, say("user"), U], [S, U]),
    "one name": ([U | {"name": "x"}, U | {"name": "x"}], [say("user", "u\n\nu", name="x")]),
    "two names": ([U | {"name": "x"}, U | {"name": "y"}], [say("user", "u\n\nu")]),
}
ALTERNATING = {
    "as it is": ([S, U, A, U, CALL, RESULT, A, U], []),
    "the assistant first": ([A, U], [0]),
    "the system, then the assistant": ([S, A, U], [1]),
    "the system alone": ([S], [1]),
    "a question behind a result": ([U, CALL, RESULT, U, A], [3]),
    "a call first": ([CALL, RESULT, A], [0]),
    "an answer that thought": ([U, A, THOUGHT, U], [2]),
}


def test_one_side_speaks_at_a_time(subtests):
    for name, (chat, wanted) in JOINED.items():
        with subtests.test(name):
            before = [dict(message) for message in chat]
            assert joined(chat) == wanted and joined(wanted) == wanted
            assert chat == before


def test_the_words_of_many_messages_are_joined_in_linear_time():
    (found,) = joined([U] * 30_000)
    assert found["content"].count("u") == 30_000


def test_sides_take_turns(subtests):
    for name, (chat, places) in ALTERNATING.items():
        with subtests.test(name):
            found = alternating(chat)
            assert [i for i, x in enumerate(found) if x["content"] == "..."] == places
            assert [x for x in found if x["content"] != "..."] == chat
            turns = [x["role"] for x in found if x["role"] in ("user", "assistant") and x != CALL]
            assert turns == [("user", "assistant")[i % 2] for i in range(len(turns))]


def test_a_chat_that_grows_keeps_its_beginning():
    """At every answer of a chat with all the oddities."""
    chat = [S, say("developer", "d") | {"role": "system"}, A, U, S, A, CALL, RESULT, U, A, U, U, A]
    ends = [i + 1 for i, x in enumerate(chat) if x is A or x is RESULT]
    for form in (joined, lambda x: alternating(joined(x)), lambda x: without_system(joined(x))):
        forms = [form(chat[:end]) for end in ends]
        for short, long in zip(forms, forms[1:], strict=False):
            assert long[: len(short) - 1] == short[:-1]
            assert long[len(short) - 1]["content"].startswith(short[-1]["content"])


def test_the_words_of_the_system_in_front_of_the_question():
    assert without_system([U, A]) == [U, A] and without_system([]) == []
    assert without_system([S, U, A]) == [say("user", "s\n\nu"), A]
    assert without_system([S, A, U]) == [say("user", "s"), A, U]
    assert without_system([S]) == [say("user", "s")]


def template(text: str | None) -> SimpleNamespace:
    def raises(words):
        raise ValueError(words)

    def apply(messages, **more):
        return Environment().from_string(text).render(messages=messages, raises=raises, **more)

    return SimpleNamespace(has_chat_template=text is not None, apply_chat_template=apply)


def test_templates_that_take_no_system(subtests):
    write = "{% for m in messages %}{{ m.content }}{% endfor %}"
    refuse = "{% if messages[0].role == 'system' %}{{ raises('no system') }}{% endif %}"
    for name, text, takes in (
        ("writes it", write, True),
        ("refuses it", refuse + write, False),
        ("leaves it out", write.replace("messages %}", "messages if m.role == 'user' %}"), False),
        ("refuses everything", "{{ raises('x') }}", True),
        ("is not there", None, True),
        ("wants a date, too", "{{ raises('x') if not date }}" + refuse + write, False),
    ):
        with subtests.test(name):
            assert takes_system(template(text), {"date": "today"}) is takes
