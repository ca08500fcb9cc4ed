"""Grammars that take long, of different kinds; see also random_grammars.HOSTILE."""

import os


def ambiguous(size, remark=""):
    """A Lark grammar whose rows take time that is cubic in its size: 100 a moment, 450 a minute."""
    rules = "\n".join(f'x{i}: e "a" | "a" e | "a" | e e' for i in range(size))
    return f"// {remark}\nstart: e\ne: {' | '.join(f'x{i}' for i in range(size))}\n{rules}"


def hidden(letters=15):
    """The same behind some letters, so that nothing is slow before the output has come so far."""
    return ambiguous(390).replace("start: e\n", f"start: /[xyz]{{{letters}}}/ e\n")


def wide(number=2000, title=""):
    """An honest schema that takes a moment to compile."""
    return {"type": "object", "title": title, "properties": {f"name{i}": {} for i in range(number)}}


def is_running(process):
    """Whether there is a process with this number."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
