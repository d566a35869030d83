"""Every planted fault still applies, and the tests that are to catch it are there. `run.py` plants them."""

from collections import Counter
from functools import cache

from run import ROOT, read_faults

FAULTS = read_faults()


@cache
def text_of(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def test_names_are_single():
    names = Counter(fault.name for fault in FAULTS)
    assert [name for name, count in names.items() if count > 1] == []


def test_faults_apply():
    for fault in FAULTS:
        assert fault.planted(text_of(fault.file)) != text_of(fault.file), fault.name


def test_their_tests_are_there():
    for fault in FAULTS:
        assert fault.tests, fault.name
        for test in fault.tests:
            path, _, name = test.partition("::")
            assert (ROOT / path).exists(), (fault.name, test)
            if name:
                assert f"def {name.partition('[')[0]}(" in text_of(path), (fault.name, test)
