"""Two processes of one ring on this machine."""

import json
import os
import socket
from contextlib import ExitStack
from pathlib import Path


def environments(folder: Path) -> list[dict[str, str]]:
    """Of both; the addresses, which are free now, stand in a file in `folder`."""
    with ExitStack() as stack:
        lines = [stack.enter_context(socket.socket()) for _ in range(2)]
        for line in lines:
            line.bind(("127.0.0.1", 0))
        hosts = [[f"127.0.0.1:{line.getsockname()[1]}"] for line in lines]
    path = folder / "hosts.json"
    path.write_text(json.dumps(hosts))
    return [os.environ | {"MLX_RANK": str(i), "MLX_HOSTFILE": str(path)} for i in range(2)]
