"""The memory model of the threefold engine is looked at when an engine file that it mirrors changes.

`cost` and `engine` never import each other, so that their agreement is evidence; this is what tells an engineer who
changes one of them about the other.
"""

import mirrors


def test_modules_name_engine_files_that_exist() -> None:
    for module, files in mirrors.mirrored_files().items():
        assert all((mirrors.PACKAGE / file).is_file() for file in files), module


def test_the_model_was_looked_at_since_the_engine_changed() -> None:
    found = "\n".join(mirrors.changes())
    assert not found, (
        f"{found}\nDoes the estimate still count these tensors? Rehearse a plan that reaches the change "
        "(`benchmarks/rehearsal.py estimate`), mend the model if it is off, then run `python tools/mirrors.py --looked`"
    )


def test_comments_docstrings_and_line_breaks_do_not_count() -> None:
    plain = dict(mirrors._function_hashes("def f(x):\n    return g(x, 2)\n"))
    other = dict(
        mirrors._function_hashes('def f(x):\n    """Doc."""\n    # Why.\n    return g(\n        x,\n        2,\n    )')
    )
    assert plain == other
    assert dict(mirrors._function_hashes("def f(x):\n    return g(x, 3)\n")) != plain


def test_a_changed_number_is_seen() -> None:
    old, new = (dict(mirrors._function_hashes(f"LIMIT = {n}\nclass A:\n    def f(self): return 1\n")) for n in (1, 2))
    assert {name for name in old if old[name] != new[name]} == {"(outside functions)"}
