"""The server through the clients that people use: chats, streams, tools, counts, lists of models, errors and keys.

openai and anthropic come with the extra `test`; LiteLLM, LangChain and llm are in `clients`, and aider runs where
MLXKV_PROGRAMS names the folder of its program. `make clients` installs and runs them all.
"""

import gc
import json
import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest
from scripted_models import SCHEMA, TOOL, WEATHER, call, saying, write_thinker
from serving import post

KEY = "the-key-of-these-tests"
ASKED, SAID, LONG = "What is the weather?", "It rains in Oslo.", "marmalade " * 300


def library(name: str):
    return pytest.importorskip(name, reason=f"{name} is not installed: it is in the extra clients")


class Client:
    """A client's own way to do what all can do. key, model: what the server is asked with.

    Counts are (tokens of the prompt, of the reply). unknown, long, wrong: its errors for a model that is not there, a
    prompt that is too long, and a wrong key.
    """

    def __init__(self, url: str, folder, key: str = KEY, model: str = "caller"):
        self.url, self.folder, self.key, self.model = url, folder, key, model
        self.start()

    def start(self) -> None:
        raise NotImplementedError

    def chat(self, text: str) -> tuple[str, tuple[int, int]]:
        raise NotImplementedError

    def stream(self, text: str) -> tuple[list[str], tuple[int, int]]:
        raise NotImplementedError

    def tool(self, text: str, answer) -> str:
        """The reply to what `answer` says of the arguments that the model called the tool with."""
        raise NotImplementedError

    def models(self) -> list[str]:
        raise NotImplementedError

    def close(self) -> None:
        pass


def asked(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


class OpenAI(Client):
    """Chat completions of OpenAI's library."""

    def start(self):
        openai = pytest.importorskip("openai")
        self.client = openai.OpenAI(base_url=self.url + "/v1", api_key=self.key, max_retries=0)
        self.create = self.client.chat.completions.create
        self.unknown, self.long = openai.NotFoundError, openai.BadRequestError
        self.wrong = openai.AuthenticationError

    def chat(self, text):
        found = self.create(model=self.model, messages=asked(text))
        return found.choices[0].message.content, _counts(found.usage)

    def stream(self, text):
        *chunks, last = self.create(
            model=self.model,
            messages=asked(text),
            stream=True,
            stream_options={"include_usage": True},
        )
        assert chunks[-1].choices[0].finish_reason == "stop" and last.choices == []
        pieces = [chunk.choices[0].delta.content for chunk in chunks]
        return [piece for piece in pieces if piece], _counts(last.usage)

    def tool(self, text, answer):
        tools, messages = [{"type": "function", "function": TOOL}], asked(text)
        message = self.create(model=self.model, messages=messages, tools=tools).choices[0].message
        (one,) = message.tool_calls
        assert one.function.name == "weather"
        result = answer(**json.loads(one.function.arguments))
        messages += [message, {"role": "tool", "tool_call_id": one.id, "content": result}]
        found = self.create(model=self.model, messages=messages, tools=tools)
        return found.choices[0].message.content

    def models(self):
        (model,) = self.client.models.list()
        assert self.client.models.retrieve(model.id) == model
        return [model.id]

    def close(self):
        self.client.close()


def _counts(usage) -> tuple[int, int]:
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    return usage.prompt_tokens, usage.completion_tokens


class Anthropic(Client):
    def start(self):
        anthropic = pytest.importorskip("anthropic")
        self.client = anthropic.Anthropic(base_url=self.url, api_key=self.key, max_retries=0)
        self.asked = {"model": self.model, "max_tokens": 200}
        self.unknown, self.long = anthropic.NotFoundError, anthropic.BadRequestError
        self.wrong = anthropic.AuthenticationError

    def chat(self, text):
        found = self.client.messages.create(messages=asked(text), **self.asked)
        return found.content[0].text, self.counts(found.usage)

    @staticmethod
    def counts(usage):
        return usage.input_tokens + usage.cache_read_input_tokens, usage.output_tokens

    def stream(self, text):
        with self.client.messages.stream(messages=asked(text), **self.asked) as stream:
            pieces = list(stream.text_stream)
            return pieces, self.counts(stream.get_final_message().usage)

    def tool(self, text, answer):
        from anthropic import beta_tool

        tool = beta_tool(answer, name="weather", description="The weather.", input_schema=SCHEMA)
        run = self.client.beta.messages.tool_runner(
            messages=asked(text), tools=[tool], **self.asked
        )
        return run.until_done().content[0].text

    def models(self):
        (model,) = self.client.models.list()
        assert self.client.models.retrieve(model.id) == model
        return [model.id]

    def close(self):
        self.client.close()


class LiteLLM(Client):
    """LiteLLM by the name of a server with OpenAI's API."""

    provider, path = "openai", "/v1"

    def start(self):
        self.litellm = litellm = library("litellm")
        self.asked = {"model": f"{self.provider}/{self.model}", "max_retries": 0, "max_tokens": 200}
        self.asked |= {"api_base": self.url + self.path, "api_key": self.key}
        self.unknown, self.wrong = litellm.NotFoundError, litellm.AuthenticationError
        self.long = litellm.ContextWindowExceededError

    def chat(self, text):
        found = self.litellm.completion(messages=asked(text), **self.asked)
        return found.choices[0].message.content, _counts(found.usage)

    def stream(self, text):
        options = {"include_usage": True}
        chunks = list(
            self.litellm.completion(
                messages=asked(text), stream=True, stream_options=options, **self.asked
            )
        )
        pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
        whole = self.litellm.stream_chunk_builder(chunks, messages=asked(text))
        return [piece for piece in pieces if piece], _counts(whole.usage)

    def tool(self, text, answer):
        tools, messages = [{"type": "function", "function": TOOL}], asked(text)
        found = self.litellm.completion(messages=messages, tools=tools, **self.asked)
        message = found.choices[0].message
        (one,) = message.tool_calls
        assert one.function.name == "weather"
        result = answer(**json.loads(one.function.arguments))
        messages += [message, {"role": "tool", "tool_call_id": one.id, "content": result}]
        found = self.litellm.completion(messages=messages, tools=tools, **self.asked)
        return found.choices[0].message.content

    def models(self):
        return self.litellm.get_valid_models(
            check_provider_endpoint=True,
            custom_llm_provider=self.provider,
            api_key=self.key,
            api_base=self.url + self.path,
        )


class LiteLLMMessages(LiteLLM):
    """LiteLLM by the name of a server with Anthropic's API."""

    provider, path = "anthropic", ""


class LangChain(Client):
    more: dict = {}

    def start(self):
        langchain = library("langchain_openai")
        from langchain_core.exceptions import ContextOverflowError
        from openai import AuthenticationError, NotFoundError

        self.client = langchain.ChatOpenAI(
            base_url=self.url + "/v1",
            api_key=self.key,
            model=self.model,
            max_retries=0,
            stream_usage=True,
            **self.more,
        )
        self.unknown, self.wrong, self.long = (
            NotFoundError,
            AuthenticationError,
            ContextOverflowError,
        )

    def chat(self, text):
        found = self.client.invoke(text)
        return found.text, self.counts(found.usage_metadata)

    @staticmethod
    def counts(usage):
        return usage["input_tokens"], usage["output_tokens"]

    def stream(self, text):
        chunks = list(self.client.stream(text))
        whole = sum(chunks[1:], chunks[0])
        pieces = [chunk.text for chunk in chunks if chunk.text]
        return pieces, self.counts(whole.usage_metadata)

    def tool(self, text, answer):
        from langchain_core.messages import HumanMessage
        from langchain_core.tools import tool

        weather = tool("weather")(answer)
        client, messages = self.client.bind_tools([weather]), [HumanMessage(text)]
        message = client.invoke(messages)
        (one,) = message.tool_calls
        messages += [message, weather.invoke(one)]
        return client.invoke(messages).text


class LangChainResponses(LangChain):
    more = {"use_responses_api": True}


class LLM(Client):
    """llm's command, with a model of its file for servers with OpenAI's API."""

    class Told(Exception):
        """What the command says before it ends with another code than 0."""

    unknown = long = wrong = Told

    def start(self):
        self.llm = library("llm")
        model = {"model_id": "mlxkv", "model_name": self.model, "api_base": self.url + "/v1"}
        model |= {"api_key_name": "mlxkv", "supports_tools": True}
        (self.folder / "extra-openai-models.yaml").write_text(json.dumps([model]))
        (self.folder / "keys.json").write_text(json.dumps({"mlxkv": self.key}))

    def command(self, *args: str):
        from click.testing import CliRunner
        from llm.cli import cli

        done = CliRunner().invoke(cli, args)
        if done.exit_code:
            raise self.Told(done.output)
        return done

    def chat(self, text):
        done = self.command("-m", "mlxkv", "--usage", "--no-stream", text)
        words = done.stderr.replace(",", "").split()
        return done.stdout.strip(), (int(words[2]), int(words[4]))

    def stream(self, text):
        response = self.llm.get_model("mlxkv").prompt(text, stream=True)
        pieces, usage = list(response), response.usage()
        return pieces, (usage.input, usage.output)

    def tool(self, text, answer):
        tools = [self.llm.Tool.function(answer, "weather")]
        *_, last = self.llm.get_model("mlxkv").chain(text, tools=tools).responses()
        return last.text()

    def models(self):
        url = self.url + "/v1"
        return self.command("openai", "endpoint", url, "--models", "--key", self.key).stdout.split()


# What other people's packages warn of is theirs.
OTHERS = [LiteLLM, LiteLLMMessages, LangChain, LangChainResponses, LLM]
CLIENTS = [OpenAI, Anthropic]
CLIENTS += [pytest.param(each, marks=pytest.mark.filterwarnings("ignore")) for each in OTHERS]


@pytest.fixture(scope="module")
def keyed(said, tmp_path_factory):
    """A server that wants a key."""
    folder = write_thinker(tmp_path_factory.mktemp("keyed") / "caller")
    with saying(folder, said, api_key=KEY) as server:
        yield server


@pytest.fixture(params=CLIENTS)
def started(request, keyed, tmp_path, monkeypatch) -> Iterator:
    """Starts this client, with any key and model."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else its import asks for prices
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    clients = []

    def start(**other):
        clients.append(request.param(keyed.url, tmp_path, **other))
        return clients[-1]

    yield start
    for client in clients:
        client.close()
    clients.clear()
    gc.collect()  # what a client leaves open warns here


def test_a_chat_and_a_stream(started, keyed, said):
    said[0] = SAID
    body = {"messages": asked(ASKED), "max_tokens": 1}
    counted = post(keyed, "/v1/chat/completions", {"x-api-key": KEY}, **body)["usage"]
    counts = counted["prompt_tokens"], len(SAID) + 1  # a byte a token, and the last one
    client = started()
    assert client.chat(ASKED) == (SAID, counts)
    pieces, streamed = client.stream(ASKED)
    assert "".join(pieces) == SAID and len(pieces) > 2
    assert streamed == counts


def test_a_tool_is_called_and_its_result_read(started, said):
    found = []

    def weather(city: str, days: int) -> str:
        """The weather of some days."""
        found.append({"city": city, "days": days})
        said[0] = SAID
        return "rain"

    said[0] = "Let me look. " + call(WEATHER)
    assert started().tool(ASKED, weather) == SAID
    assert found == [WEATHER["arguments"]]


def test_the_models_are_listed(started, request):
    client = started()
    if isinstance(client, LangChain):
        pytest.skip("LangChain lists no models")
    assert [name.rpartition("/")[2] for name in client.models()] == ["caller"]


def test_errors_are_its_own(started, said):
    """With the server's words, and of the class that tells programs what to do."""
    said[0] = SAID
    client = started()
    with pytest.raises(client.long, match="prompt is too long"):
        client.chat(LONG)
    client = started(model="qwen3-4b")
    with pytest.raises(client.unknown, match="no such model; got 'qwen3-4b'; choose 'caller'"):
        client.chat(ASKED)
    client = started(key="wrong")
    with pytest.raises(client.wrong, match="missing or wrong API key"):
        client.chat(ASKED)


EDIT = """Here it is.

note.py
```
<<<<<<< SEARCH
word = "plum"
=======
word = "marmalade"
>>>>>>> REPLACE
```
"""


@pytest.mark.slow
def test_aider_edits_a_file(said, tmp_path):
    program = shutil.which("aider", path=os.environ.get("MLXKV_PROGRAMS", ""))
    if program is None:
        pytest.skip("no aider: MLXKV_PROGRAMS names no folder with it")
    work = tmp_path / "work"
    work.mkdir()
    (work / "note.py").write_text('word = "plum"\n')
    said[0] = EDIT
    folder = write_thinker(
        tmp_path / "caller", words=4000, num_hidden_layers=1, max_position_embeddings=1 << 14
    )
    options = ["--no-git", "--yes-always", "--no-check-update", "--no-show-model-warnings"]
    options += ["--edit-format", "diff", "--model", "openai/caller", "--no-analytics"]
    with saying(folder, said, api_key=KEY, chunk=4096) as server:
        done = subprocess.run(
            [program, *options, "--message", "Say marmalade.", "note.py"],
            env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "TERM": "dumb"}
            | {"OPENAI_API_BASE": server.url + "/v1", "OPENAI_API_KEY": KEY},
            cwd=work,
            capture_output=True,
            text=True,
            timeout=300,
            stdin=subprocess.DEVNULL,
        )
    assert done.returncode == 0 and "Applied edit to note.py" in done.stdout, done.stdout[-2000:]
    assert (work / "note.py").read_text() == 'word = "marmalade"\n'
