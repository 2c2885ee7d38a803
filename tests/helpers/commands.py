"""A command as a user runs it, and the line that bad input gets."""

from mmkv.cli import commands


def run(capsys, *words):
    """stdout, stderr and exit code of a command."""
    try:
        commands.main([str(word) for word in words])
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    printed = capsys.readouterr()
    return printed.out, printed.err, code


def complaint(capsys, *words) -> str:
    """The one line that bad input gets."""
    out, err, code = run(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith("mmkv: error: ")
    assert err == f"{err.splitlines()[0]}\n"
    return err
