"""Hypothesis runs the same examples every time, so that a red test stays red.

To look further: pytest --hypothesis-profile=explore --timeout=0
"""

from hypothesis import settings

# No deadline: on a busy machine the first example alone can be slow.
settings.register_profile("repeat", deadline=None, derandomize=True, max_examples=100)
settings.register_profile("explore", deadline=None, max_examples=2000)
settings.load_profile("repeat")
