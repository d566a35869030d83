"""How modules that are started by `python -m` end."""

import pytest

from experiments import orderings
from mlxkv import console
from mlxkv.errors import MachineError, UserError


@pytest.mark.parametrize(
    ("outcome", "code", "said"),
    [
        (None, 0, ""),
        (3, 3, ""),
        (UserError("[--x] bad; got 1"), 2, "[--x] bad; got 1\n"),
        (MachineError("[disk] full"), 1, "[disk] full\n"),
    ],
)
def test_a_tool_ends_in_one_line(outcome, code, said, capsys):
    def main():
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    with pytest.raises(SystemExit) as ended:
        console.run_tool(main)
    assert ended.value.code == code and capsys.readouterr().err == said


def test_orderings_refuse_too_few_seeds(capsys):
    with pytest.raises(SystemExit) as ended:
        console.run_tool(lambda: orderings.main(["seeds", "--seeds", "1"]))
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("[--seeds]")
