"""What all commands share: help, exit codes, errors in one line."""

import json
import subprocess
import sys
from types import ModuleType

import click
import pytest

from wholebatch import BatchError, NonFiniteError, cli


@pytest.fixture
def command(monkeypatch):
    """Put a command in place of `check`; it does what the test says."""

    def put(does):
        @click.command("check", cls=cli.Command, example="wholebatch check me.py:it")
        @click.option("--micro-batch-size", type=int)
        def fake(micro_batch_size, as_json):
            return does(as_json)

        module = ModuleType("wholebatch.cli.check")
        module.command = fake
        monkeypatch.setitem(sys.modules, "wholebatch.cli.check", module)

    return put


def _raise(error):
    raise error


def test_what_a_command_returns_is_the_exit_code(command):
    command(lambda as_json: cli.NO)
    assert cli.run(["check"]) == 1


def test_a_command_that_returns_nothing_is_done(command):
    command(lambda as_json: None)
    assert cli.run(["check"]) == 0


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BatchError("the batch is empty"), 2),
        (NonFiniteError("the loss is nan"), 3),
        (RuntimeError("broken"), 3),
        (KeyboardInterrupt(), 130),
    ],
    ids=["input", "a failure that is ours", "any other", "Ctrl-C"],
)
def test_errors_are_one_line_and_an_exit_code(command, capsys, error, code):
    command(lambda as_json: _raise(error))
    assert cli.run(["check"]) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.strip().startswith("wholebatch: ")  # after Ctrl-C on a line of its own
    assert "\n" not in said.err.strip()


@pytest.mark.parametrize("where", [["--debug", "check"], ["check", "--debug"]], ids=["before", "after"])
def test_debug_shows_the_traceback(command, capsys, where):
    command(lambda as_json: _raise(RuntimeError("broken")))
    assert cli.run(where) == 3
    assert "Traceback" in capsys.readouterr().err


def test_an_unknown_option_is_answered_with_the_nearest_known_one(command, capsys):
    command(lambda as_json: None)
    assert cli.run(["check", "--micro-batch-sise", "4"]) == 2
    assert "--micro-batch-size" in capsys.readouterr().err


def test_help_has_an_example(command, capsys):
    command(lambda as_json: None)
    assert cli.run(["check", "--help"]) == 0
    assert "Example: wholebatch check me.py:it" in capsys.readouterr().out


def test_json_is_for_programs(command, capsys):
    command(lambda as_json: cli.say("for a person", as_json, {"exact": True}))
    cli.run(["check"])
    assert capsys.readouterr().out == "for a person\n"
    cli.run(["check", "--json"])
    assert json.loads(capsys.readouterr().out) == {"exact": True}


def test_the_overview_names_every_command_without_loading_one():
    program = "import sys; from wholebatch._command import main; main(['--help']); assert 'torch' not in sys.modules"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert all(name in said for name in cli.COMMANDS)


def test_without_its_extra_the_command_line_says_what_to_install():
    program = "import sys; sys.modules['click'] = None; from wholebatch._command import main; sys.exit(main([]))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 2
    assert 'pip install "wholebatch[cli]"' in ended.stderr
