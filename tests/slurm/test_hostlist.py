"""Node lists as `scontrol show hostnames` reads them."""

import pytest

from mixtron.launch.slurm.hostlist import count_of, expand, hostnames
from mixtron.megatron_ext.errors import ConfigError

LISTS = {
    "n1": "n1",
    "n1,n2": "n1 n2",
    "linux[1,2]": "linux1 linux2",
    "n[001-003,007]": "n001 n002 n003 n007",
    "gpu-a[1-2]-ib": "gpu-a1-ib gpu-a2-ib",
    "a[1-2]b[01-02]": "a1b01 a1b02 a2b01 a2b02",
    "x[9-11]": "x9 x10 x11",
    "x[098-101]": "x098 x099 x100 x101",
    "nodeA,nodeB[001,003],nodeC": "nodeA nodeB001 nodeB003 nodeC",
    "alpha,beta,gamma": "alpha beta gamma",
    "jean-zay-ia810": "jean-zay-ia810",
}


@pytest.mark.parametrize("nodelist", LISTS)
def test_expand(nodelist):
    assert expand(nodelist) == LISTS[nodelist].split()


@pytest.mark.cluster
# SLURM's own reader, as Debian has it, knows no text after a bracket, nor a second bracket.
@pytest.mark.parametrize("nodelist", [n for n in LISTS if n not in ("gpu-a[1-2]-ib",)])
def test_scontrol_agrees(cluster, nodelist):
    assert cluster.ask("scontrol", "show", "hostnames", nodelist).split() == expand(nodelist)


@pytest.mark.parametrize("nodelist", ["n[1-2", "n1]", "n[2-1]", "n[a-b]", "n1,,n2", ""])
def test_what_slurm_never_prints_is_refused(nodelist):
    with pytest.raises(ConfigError, match="node list"):
        expand(nodelist)


def test_without_scontrol_the_parser_answers(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert hostnames("n[1-2]") == ["n1", "n2"]


def test_scontrol_is_asked_first(monkeypatch, tmp_path):
    command = tmp_path / "scontrol"
    command.write_text('#!/bin/sh\n[ "$*" = "show hostnames n[1-2]" ] && echo one && echo two\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert hostnames("n[1-2]") == ["one", "two"]


@pytest.mark.parametrize(
    ("text", "count"),
    [("8", 8), ("a100:8", 8), ("gpu:a100:4(S:0-1)", 4), ("8(x2)", 8), (None, None), ("", None)],
)
def test_counts(text, count):
    assert count_of(text) == count


def test_no_count():
    with pytest.raises(ConfigError, match="expected a count"):
        count_of("a100")
