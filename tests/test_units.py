import doctest

import pytest

from memlab import units


def test_the_examples_in_the_docstrings_hold():
    assert doctest.testmod(units).failed == 0


@pytest.mark.parametrize(
    ("text", "value"), [("2048", 2048), ("2k", 2000), ("2K", 2048), ("25.6k", 25_600), ("20G", 20 << 30), ("-1", -1)]
)
def test_counts_are_read_as_vllm_reads_them(text, value):
    assert units.parse_count(text) == value


@pytest.mark.parametrize("text", ["20GiB", "1.5K", "", "two", "2 k"])
def test_counts_that_vllm_refuses_are_refused(text):
    with pytest.raises(ValueError, match="not a number that vLLM accepts"):
        units.parse_count(text)


@pytest.mark.live
@pytest.mark.parametrize("text", ["2048", "2k", "2K", "25.6k", "20G", "20GiB", "1.5K", "1e3", ""])
def test_the_reader_of_counts_agrees_with_vllms_own(text):
    argparse_utils = pytest.importorskip("vllm.utils.argparse_utils")

    def outcome(read):
        try:
            return read(text)
        except Exception:
            return "refused"

    assert outcome(units.parse_count) == outcome(argparse_utils.human_readable_int)
