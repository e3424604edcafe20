"""How commands end."""

import subprocess
import sys

import pytest

from mtp import UserError
from mtp.commands import run_command


def failing(error):
    def command():
        raise error

    return command


@pytest.mark.parametrize(("status", "exit_status"), [(None, 0), (0, 0), (1, 1)])
def test_a_command_ends_with_its_own_status(status, exit_status):
    assert run_command(lambda: status) == exit_status


def test_a_users_error_is_one_line(capsys):
    assert run_command(failing(UserError("x: wrong; do y"))) == 2
    assert capsys.readouterr().err == "error: x: wrong; do y\n"


def test_after_ctrl_c_it_says_how_to_go_on(capsys):
    assert run_command(failing(KeyboardInterrupt()), stopped="press play") == 130
    assert capsys.readouterr().err == "stopped; press play\n"


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [("| head -c 5", 1, ""), ("> /dev/full", 2, "error: standard output: No space left on device\n")],
)
def test_output_that_goes_nowhere_is_no_traceback(end, status, said):
    code = "import sys; from mtp.commands import run_command; sys.exit(run_command(lambda: print('x' * 10**6)))"
    shell = f'set -o pipefail; "{sys.executable}" -c "{code}" {end}'
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (status, said)
