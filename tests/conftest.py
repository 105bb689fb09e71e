"""What tests share. Hypothesis runs the same examples every time, so that a red test stays red.

To look further: pytest --hypothesis-profile=explore --timeout=0
"""

from collections.abc import Iterator

import pytest
from hypothesis import settings

# No deadline: on a busy machine the first example alone can be slow.
settings.register_profile("repeat", deadline=None, derandomize=True, max_examples=100)
settings.register_profile("explore", deadline=None, max_examples=2000)
settings.load_profile("repeat")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread of torch and one seed: the same sums in the same order."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)
