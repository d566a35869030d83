"""Measure the bytes of sessions of chats about one document: `python -m experiments.sharing`.

Starts `mlxkv serve`, asks each chat its own question about the same document, and reads /v1/kv:
bytes of the sessions with their common beginning stored once, and with a copy in each.
"""

from __future__ import annotations

from experiments.fixtures import QWEN, TINY
from experiments.options import Parser, at_least, words
from mlxkv import console
from mlxkv.bench.server.asking import QUESTION, Texts
from mlxkv.bench.server.served import ServerProcess
from mlxkv.console import human_bytes
from mlxkv.errors import MachineError

COLUMNS = ("model", "chats", "sessions", "with copies", "stored once")
OWN = 40  # tokens of each chat's own question, about


def row(model: str, kv: str, chats: int, prompt: int) -> list[str]:
    options = ("--model", model, "--kv", kv, "--dtype", "float32", "--kv-memory", "4GB")
    with ServerProcess(*options) as server:
        texts = Texts()
        texts.calibrate(server, prompt // 4)
        document = texts.cut(prompt)
        for index in range(chats):
            own = f"{texts.cut(OWN, 1 + index)}\n\n{QUESTION}"
            messages = [
                {"role": "system", "content": document},
                {"role": "user", "content": own},
            ]
            reply = server.ask(messages, 8)
            if reply.error is not None:
                raise MachineError(f"[sharing] a request failed: {reply.error}")
        found = server.kv()
    memory = found["memory"]
    sizes = [memory["sessions_allocated_bytes_apart"], memory["sessions_allocated_bytes"]]
    return [model, str(chats), str(found["sessions"]["count"]), *map(human_bytes, sizes)]


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("sharing", __doc__)
    add = parser.add_argument
    add("--models", type=words, default=(QWEN, TINY), help="by commas")
    add("--kv", default="int4", help="cache preset")
    add("--chats", type=int, default=8, help="chats about the document")
    add("--prompt", default="2700", help="tokens of the document, about")
    args = parser.parse_args(arguments)
    prompt = console.parse_tokens(args.prompt, "--prompt")
    at_least("--chats", args.chats, 1)
    at_least("--prompt", prompt, 256)
    rows = [row(model, args.kv, args.chats, prompt) for model in args.models]
    console.print_table(COLUMNS, rows, f"--kv {args.kv}, a document of about {prompt} tokens")


if __name__ == "__main__":
    console.run_tool(main)
