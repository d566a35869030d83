"""Calls of tools as models write them, in the form of each of mlx-lm's parsers: read whole and exactly, or not."""

import json
from importlib import import_module
from importlib.util import find_spec

import pytest

from mlxkv.serve.apis.reply import call_parts

PARAMETERS = {
    "pattern": {"type": "string"},
    "depth": {"type": "integer"},
    "all": {"type": "boolean"},
    "where": {"type": "object"},
}
GREP = {"name": "grep", "parameters": {"type": "object", "properties": PARAMETERS}}
READ = {
    "name": "read",
    "parameters": {"type": "object", "properties": {"path": {}}, "required": ["path"]},
}
NOW = {"name": "now"}  # OpenAI's API takes tools without parameters
TOOLS = [{"type": "function", "function": one} for one in (GREP, READ, NOW)]
A, D = {"pattern": "a"}, {"pattern": "a", "depth": 3}
S, Q = '<|"|>', "<escape>"  # around Gemma's strings
NESTED = f"call:grep{{pattern:{S}call:a {{{S},where:{{depth:3}}}}"
PYTHON = """{'name': 'grep', 'arguments': {'pattern': "it's", 'all': True}}"""
CODER = "<function=grep>\n<parameter=pattern>\n{}\n</parameter>\n"
DEPTH = "<function=grep>\n<parameter=depth>\n{}\n</parameter>\n</function>"
INVOKE = '<invoke name="grep"><parameter name="pattern">{}</parameter></invoke>'
ATEM = '<atem:invoke name="grep"><atem:parameter name="pattern">{}</atem:parameter></atem:invoke>'
PAIR = "<arg_key>pattern</arg_key><arg_value>{}</arg_value>"
LONG = PAIR.replace("arg_", "longcat_arg_")
K2 = "<|tool_call_begin|>functions.grep:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
K3 = (
    '<|open|>call tool="grep" index="1"<|sep|><|open|>argument key="pattern" type="string"'
    "<|sep|>{}<|close|>argument<|sep|><|close|>call<|sep|>"
)


def grep(text: str) -> str:
    return '{"name": "grep", "arguments": ' + text


# A parser, what stands between the marks, and the arguments of its calls of `grep`.
READABLE = [
    ("json_tools", grep('{"pattern": "a"}}'), A),
    ("json_tools", grep('{"pattern": "\\d+\\.\\s\\""}}'), {"pattern": '\\d+\\.\\s"'}),
    ("json_tools", grep('{"pattern": "C:\\Users\\me"}}'), {"pattern": "C:\\Users\\me"}),
    ("json_tools", grep('{"pattern": "a\nb\tc"}}'), {"pattern": "a\nb\tc"}),
    ("json_tools", grep('{"pattern": "a, }", "depth": 3,},}'), {"pattern": "a, }", "depth": 3}),
    ("json_tools", grep('"{\\"pattern\\": \\"a\\"}"}'), A),
    ("json_tools", '{"name": "grep", "parameters": {"pattern": "a"}}', A),
    ("json_tools", '{"name": "grep"}', {}),
    ("json_tools", grep("null}"), {}),
    ("json_tools", PYTHON, {"pattern": "it's", "all": True}),
    ("json_tools", grep('{"pattern": "a{"'), {"pattern": "a{"}),
    ("json_tools", grep('{"pattern": "a"}}}\n'), A),
    ("json_tools", grep('{"pattern": "a"}}') + "\n" + grep('{"depth": 3}}'), [A, {"depth": 3}]),
    ("json_tools", f"[{grep('{}}')}, {grep('{}}')}]", [{}, {}]),
    ("qwen3_coder", CODER.format("\\d <b>") + "</function>", {"pattern": "\\d <b>"}),
    ("qwen3_coder", CODER.format("a"), A),
    ("qwen3_coder", 2 * (CODER.format("a") + "</function>\n"), [A, A]),
    ("qwen3_coder", DEPTH.format("three"), {"depth": "three"}),
    ("qwen3_coder", DEPTH.format("1e999"), {"depth": "1e999"}),
    ("qwen3_coder", DEPTH.format("1234567890123456789"), {"depth": 1234567890123456789}),
    ("qwen3_coder", DEPTH.replace("depth", "all").format("yes"), {"all": "yes"}),
    ("qwen3_coder", DEPTH.replace("depth", "all").format("True"), {"all": True}),
    ("qwen3_coder", DEPTH.replace("depth", "where").format('{"a": [1]}'), {"where": {"a": [1]}}),
    ("glm47", "grep" + PAIR.format("a") + PAIR.format("3").replace("pattern", "depth"), D),
    ("glm47", "grep\n", {}),
    ("glm47", 'grep\n{"pattern": "a"}', A),
    ("glm47", grep('{"pattern": "\\d"}}'), {"pattern": "\\d"}),
    ("longcat", "grep\n" + LONG.format("a"), A),
    ("longcat", "now", {}),
    ("longcat", grep('{"pattern": "a",}}'), A),
    ("minimax_m2", INVOKE.format("a") + INVOKE.format("b"), [A, {"pattern": "b"}]),
    ("minicpm5", '"grep"><param name="pattern">a</param>', A),
    ("muse_spark", ATEM.format("a") + ATEM.format("b"), [A, {"pattern": "b"}]),
    ("kimi_k2", K2.format('{"pattern": "\\d"}'), {"pattern": "\\d"}),
    ("kimi_k2", K2.format("{}") + K2.format('{"pattern": "a"}'), [{}, A]),
    ("kimi_k3", K3.format("a") + K3.format("b"), [A, {"pattern": "b"}]),
    ("mistral", 'grep[ARGS]{"pattern": "a"}[TOOL_CALLS]grep[ARGS]{"depth": 3}', [A, {"depth": 3}]),
    ("mistral", 'grep[CALL_ID]9f8a[ARGS]{"pattern": "a\nb"}', {"pattern": "a\nb"}),
    ("mistral", f"[{grep('{')}'pattern': 'a'}}}}]".replace('"', "'"), A),
    ("pythonic", '[grep(pattern="a", depth=3), grep(all=true)]', [D, {"all": True}]),
    ("pythonic", '[grep(pattern="a\nb")]', {"pattern": "a\nb"}),
    ("pythonic", '[grep(pattern="\\d")]', {"pattern": "\\d"}),
    ("pythonic", f"[{grep('{}}')}]", {}),
    ("gemma4", NESTED, {"pattern": "call:a {", "where": {"depth": 3}}),
    ("function_gemma", f"call:grep{{pattern:{Q}a{{{Q},depth:3}}", {"pattern": "a{", "depth": 3}),
]
# What has no one reading, or of which a parser would lose or invent a part.
UNREADABLE = [
    ("json_tools", ""),
    ("json_tools", "[]"),
    ("json_tools", '"grep"'),
    ("json_tools", "grep it"),
    ("json_tools", grep('{"pattern": "C:\\Users\\new"}}')),  # a line break, or a folder?
    ("json_tools", grep('{"pattern": "\\d", "where": {"a": "C:\\temp"}}}')),
    ("json_tools", grep('{"pattern": "it\\\'s \\d"}}')),
    ("json_tools", grep('{"pattern": "\\x41"}}')),
    ("json_tools", grep('{"where": {"depth": 1, "pattern": "a"}}')),  # whose brace is missing?
    ("json_tools", grep('{"pattern": "a')),
    ("json_tools", grep('"[{}]"}')),
    ("json_tools", grep('[{"pattern": "a"}]}')),
    ("json_tools", grep('{}, "parameters": {"pattern": "a"}}')),
    ("json_tools", '{"name": "grep", "pattern": "a"}'),
    ("json_tools", '{"name": "read"}'),
    ("json_tools", grep("0}")),
    ("json_tools", '{"name": "unknown"}'),
    ("json_tools", "{'name': 'grep', 'arguments': {'pattern': 'it''s'}}"),
    ("json_tools", "{'name': 'grep', 'arguments': {'pattern': 'it\\'s'}}"),
    ("json_tools", grep('{"depth": NaN}}')),
    ("json_tools", grep('{"depth": ' + "[" * 100_000)),
    ("json_tools", grep('{"pattern": "a"}} and so on')),
    ("qwen3_coder", "<function=grep>\n<parameter=pattern>\na\n</function>"),
    ("qwen3_coder", CODER.format("a\n<parameter=depth>\n3") + "</function>"),
    ("qwen3_coder", CODER.format("a </parameter> b") + "</function>"),
    ("glm47", "I do not know"),
    ("glm47", '{"name": "grep", "arguments": {"pattern": "a'),
    ("glm47", "grep<arg_key>pattern</arg_key>a</arg_value>"),
    ("glm47", "Now grep" + PAIR.format("a")),
    ("longcat", "read"),
    ("longcat", "grep" + LONG.format("a") + "<longcat_arg_key>depth</longcat_arg_key>"),
    ("minimax_m2", INVOKE.format("a") + '<invoke name="grep">'),
    ("minimax_m2", INVOKE.format('a<parameter name="depth">3')),
    ("minicpm5", '"grep"><param name="pattern">a</param><param name="depth">3'),
    ("muse_spark", ATEM.format('a<atem:parameter name="depth">3')),
    ("kimi_k2", K2.format('{"pattern": "a') + K2.format("{}")),
    ("kimi_k2", K2.format('{"pattern": "C:\\new \\d"}')),
    ("kimi_k2", K2.format("{}") + K2.format("{}").removesuffix("<|tool_call_end|>")),
    ("kimi_k3", K3.format("a") + K3.format("b").replace('tool="grep" ', "")),
    ("mistral", 'grep[ARGS]{"pattern": "a"}[TOOL_CALLS]grep[ARGS]{"pattern": "b'),
    ("mistral", 'grep[ARGS]{"pattern": '),
    ("pythonic", '[grep("a", depth=3)]'),
    ("pythonic", "[grep(pattern=find(1, 2))]"),
    ("pythonic", '[grep(pattern="a" depth=3)]'),
    ("gemma4", f"call:grep{{pattern:{S}a{S}}}call:grep{{pattern:"),
    ("gemma4", "call:grep{pattern:a b}"),
    ("function_gemma", "call:grep{where:{depth:1},depth:3}"),
    ("function_gemma", f"call:grep{{pattern:{Q}a{Q}}}call:grep{{}}"),
]


def parser(name: str):
    if find_spec(f"mlx_lm.tool_parsers.{name}") is None:
        pytest.skip(f"this mlx-lm has no {name}")
    return import_module(f"mlx_lm.tool_parsers.{name}").parse_tool_call


def test_what_has_one_reading_is_read(subtests):
    for name, text, expected in READABLE:
        with subtests.test(f"{name} {text}"):
            parts = call_parts(parser(name), text, TOOLS, True)
            assert [json.loads(part[3]) for part in parts] == (
                expected if isinstance(expected, list) else [expected]
            )
            assert {part[2] for part in parts} <= {"grep", "now"} and parts


def test_what_has_none_is_not(subtests):
    for name, text in UNREADABLE:
        with subtests.test(f"{name} {text[:200]}"):
            parse = parser(name)
            with pytest.raises(Exception):  # noqa: B017 - parsers raise anything
                print(call_parts(parse, text, TOOLS, True))


def test_a_call_without_its_end(subtests):
    """It is complete where its own text says so."""
    for name, text, complete in (
        ("json_tools", grep('{"pattern": "a"}}'), True),
        ("json_tools", grep('{"pattern": "a"'), False),
        ("qwen3_coder", CODER.format("a") + "</function>", True),
        ("qwen3_coder", CODER.format("a"), False),
        ("glm47", "grep" + PAIR.format("a"), False),
        ("longcat", "grep" + LONG.format("a"), False),
        ("minicpm5", '"grep"><param name="pattern">a</param>', False),
        ("pythonic", '[grep(pattern="a")]', True),
        ("mistral", 'grep[ARGS]{"pattern": "a"}', True),
    ):
        with subtests.test(f"{name} {text}"):
            parse = parser(name)
            if complete:
                assert json.loads(call_parts(parse, text, TOOLS, False)[0][3]) == A
            else:
                with pytest.raises(Exception):  # noqa: B017
                    print(call_parts(parse, text, TOOLS, False))


def test_words_behind_calls_that_have_no_closing_mark():
    text = 'grep[ARGS]{"pattern": "a"}\nThere.'
    call, words = call_parts(parser("mistral"), text, TOOLS, False)
    assert json.loads(call[3]) == A and words == ("text", "\nThere.")


def test_the_id_that_a_model_gives(subtests):
    for name, text, id in (
        ("mistral", "grep[CALL_ID]9f8a[ARGS]{}", "9f8a"),
        ("kimi_k2", K2.format("{}"), "functions.grep:0"),
    ):
        with subtests.test(name):
            ((_, found, called, _),) = call_parts(parser(name), text, TOOLS, False)
            assert (found, called) == (id, "grep")
