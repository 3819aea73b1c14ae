"""The picture of a run."""

import sys

import pytest

from quire.cli import main
from quire.common.errors import ConfigError
from quire.interfaces.simulate.plot import check_plot_path

ARGUMENTS = ["simulate", "--requests", "30", "--num-blocks", "100", "--num-host-blocks", "50"]


def test_one_seed_is_one_picture_to_the_byte(tmp_path):
    pictures = []
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert main([*ARGUMENTS, "--seed", seed, "--plot", str(tmp_path / f"{name}.svg")]) == 0
        pictures.append((tmp_path / f"{name}.svg").read_bytes())
    assert pictures[0] == pictures[1] != pictures[2]
    assert pictures[0].count(b'<g id="axes_') == 3


def test_a_png_is_drawn_and_the_report_comes_as_well(tmp_path, capsys):
    assert main([*ARGUMENTS, "--plot", str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "requests             30" in capsys.readouterr().out


def test_a_run_of_no_requests_has_a_picture_too(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    assert main(["simulate", "--trace", str(tmp_path / "empty.jsonl"), "--plot", str(tmp_path / "a.svg")]) == 0
    assert (tmp_path / "a.svg").stat().st_size > 1000


def test_without_matplotlib_the_error_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'quire\[plot\]'"):
        check_plot_path(tmp_path / "a.svg")


def test_a_place_that_cannot_be_written_is_refused(tmp_path, capsys):
    (tmp_path / "a.svg").mkdir()
    assert main([*ARGUMENTS, "--plot", str(tmp_path / "a.svg")]) == 2
    assert "cannot plot to" in capsys.readouterr().err
